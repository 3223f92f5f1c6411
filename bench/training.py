"""One optimizer step and one log-prob pass on one CUDA device: our training engine and its peers.

| engine | what it is |
|---|---|
| ours | verl's TrainEngine: packed rows, fused log-probs, AdamW, FSDP2 over a mesh of one, bf16 compute |
| ours-compiled | the same with compiled decoder layers |
| ours-shared | as ours, prompts of a group computed once (for `--shared-prompts`) |
| ours-shared-compiled | the same with compiled decoder layers |
| torch | transformers' module, packed `varlen_attn`, compiled layers, log-probs in recomputed chunks, bf16 autocast |
| torch-eager | the same, not compiled |
| hf | transformers as TRL's trainer runs it: padded rows, sdpa, bf16 autocast, fp32 logits of all response tokens |

Every engine runs in a process of its own, one after the other, with a time limit, on the same
random weights (fp32 parameters) and rows. Its result is printed as soon as it is known, with loss,
mean log-prob and norm of the gradient for comparison. MFU counts model FLOPs, of 989 TFLOP/s on an
H200: the head at response tokens alone, causal attention, no recomputation.

Full training of the 7b shape takes 16 bytes a parameter, 122 GB, before any activation: it runs
without its optimizer unless `--optimizer` is given; `--lora 32` trains adapters. Run `python
bench/training.py`, or for example with `--models 0.5b,1.5b,7b --lengths
fixed:1024,fixed:4096,fixed:16384 --checkpointing on,off --engines ours,ours-compiled,torch,hf`;
`--tiny` tries the script on CPU. Jobs, results and logs are in the folder `--out`.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import sys

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the FLOPs of the common part

import torch
from processes import run_side
from rollout_models import FAMILIES, SHAPES, is_known, shape_of, write_config
from rollout_work import parse_lengths
from training_work import Job

# As the trainer has it (`use_expandable_segments`).
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("training_ours.py", {}),
    "ours-compiled": ("training_ours.py", {"compile": True}),
    "ours-shared": ("training_ours.py", {"share_prompts": True}),
    "ours-shared-compiled": ("training_ours.py", {"share_prompts": True, "compile": True}),
    "torch": ("training_torch.py", {"compile": True}),
    "torch-eager": ("training_torch.py", {}),
    "hf": ("training_hf.py", {}),
}
DEVICE_DEFAULTS = {
    "models": "1.5b",
    "lengths": "fixed:4096",
    "tokens": 65_536,
    "micro_tokens": 16_384,
}
TINY_DEFAULTS = {
    "models": "tiny",
    "lengths": "fixed:64,tail:48",
    "tokens": 512,
    "micro_tokens": 200,
}
# One prompt of 1,024 tokens for 16 responses of 512 (tiny: 32 and 16).
SHARED = {"lengths": "fixed:1536", "prompt_tokens": 1024, "samples": 16, "micro_tokens": 24_576}
TINY_SHARED = {"lengths": "fixed:48", "prompt_tokens": 32, "samples": 4, "micro_tokens": 200}
HEADER = (
    "| engine | update s | tok/s | MFU | peak GiB | of which optimizer s | log-prob s | tok/s | "
    "MFU | peak GiB | loss | log-prob, update | log-prob, pass | grad norm | start-up s |"
)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        help=f"of {', '.join((*SHAPES, *FAMILIES))}; several with commas, 8 layers by name@8 [1.5b]",
    )
    parser.add_argument("--engines", help="see above; several with commas [ours,torch,hf]")
    parser.add_argument("--compile", action="store_true", help="ours-compiled too, as in --engines")
    parser.add_argument(
        "--lengths", help="of a row: fixed:L or tail:L; several with commas [fixed:4096]"
    )

    parser.add_argument("--tokens", type=int, help="of the mini-batch [65536]")
    parser.add_argument(
        "--micro-tokens", type=int, help="of a forward-backward pass, at least a row [16384]"
    )
    parser.add_argument("--prompt-tokens", type=int, help="of each row [L / 16]")
    parser.add_argument("--samples", type=int, help="rows that share a prompt [1]")
    parser.add_argument(
        "--checkpointing",
        default="on",
        help="on, off or ours's share of the layers, 0.5 say; several with commas [on]",
    )

    parser.add_argument(
        "--lora", type=int, default=0, help="rank of adapters; 0 trains all weights [0]"
    )
    parser.add_argument(
        "--keep-gathered",
        action="store_true",
        help="ours with fsdp_config.reshard_after_forward=false: weights stay from pass to pass",
    )
    parser.add_argument("--no-optimizer", action="store_true", help="gradients alone")
    parser.add_argument(
        "--optimizer", action="store_true", help="the optimizer step also of the 7b shape"
    )
    parser.add_argument(
        "--no-entropy", action="store_true", help="ours and hf without entropies in the update"
    )

    parser.add_argument(
        "--shared-prompts", action="store_true", help="groups of 16 with 1,024 + 512 tokens"
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="timed runs, of which the best counts [2]"
    )
    parser.add_argument(
        "--limit-s", type=float, default=300.0, help="time limit of an engine on one workload [300]"
    )

    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few tokens, on CPU")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/training"), help="folder for logs and JSON"
    )
    arguments = parser.parse_args(words)

    try:
        return complete(arguments)
    except ValueError as error:
        parser.error(str(error))


def complete(arguments: argparse.Namespace) -> argparse.Namespace:
    """Fill in defaults. Raises ValueError for an unknown name or a number that is out of range."""
    shared = (TINY_SHARED if arguments.tiny else SHARED) if arguments.shared_prompts else {}
    defaults = {
        **(TINY_DEFAULTS if arguments.tiny else DEVICE_DEFAULTS),
        "prompt_tokens": None,
        "samples": 1,
        **shared,
    }

    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)

    usual = "ours,ours-shared" if arguments.shared_prompts else "ours,torch,hf"
    arguments.engines = (arguments.engines or usual).split(",") + [
        "ours-compiled"
    ] * arguments.compile
    arguments.engines = list(dict.fromkeys(arguments.engines))
    for name in ("models", "lengths", "checkpointing"):
        setattr(arguments, name, getattr(arguments, name).split(","))
    for name in arguments.engines:
        if name not in ENGINES:
            raise ValueError(f"--engines must be of {', '.join(ENGINES)}, got '{name}'.")
    for name in arguments.models:
        if not is_known(name):
            known = ", ".join((*SHAPES, *FAMILIES))
            raise ValueError(f"--models must be of {known}, got '{name}'.")

    for checkpointing in arguments.checkpointing:
        if checkpointing not in ("on", "off") and not 0 < float(checkpointing) < 1:
            raise ValueError(
                "--checkpointing must be on, off or a share between 0 and 1, got "
                f"'{checkpointing}'."
            )

    for lengths in arguments.lengths:
        _, longest = parse_lengths(lengths)
        if longest > arguments.micro_tokens:
            raise ValueError(
                f"--micro-tokens must hold a row of {longest} tokens, got {arguments.micro_tokens}."
            )
        if arguments.prompt_tokens is not None and not 0 < arguments.prompt_tokens < longest:
            raise ValueError(
                f"--prompt-tokens must be in 1..{longest - 1}, got {arguments.prompt_tokens}."
            )

    if min(arguments.samples, arguments.repeats) < 1 or arguments.lora < 0:
        raise ValueError("--samples and --repeats must be at least 1, --lora at least 0.")
    return arguments


def make_job(
    arguments: argparse.Namespace, model: str, lengths: str, checkpointing: str, engine: str
) -> Job:
    _, longest = parse_lengths(lengths)
    fits = model != "7b" or arguments.lora > 0 or arguments.optimizer
    return Job(
        folder=str(arguments.out / model / "model"),
        device="cpu" if arguments.tiny else "cuda",
        vocabulary=shape_of(model)["vocab_size"],
        lengths=lengths,
        prompt_tokens=arguments.prompt_tokens or max(1, longest // 16),
        samples=arguments.samples,
        tokens=arguments.tokens,
        micro_tokens=arguments.micro_tokens,
        checkpointing=checkpointing != "off",
        checkpointing_share=1.0 if checkpointing in ("on", "off") else float(checkpointing),
        optimizer=fits and not arguments.no_optimizer,
        lora=arguments.lora,
        entropy=not arguments.no_entropy,
        keep_gathered=arguments.keep_gathered,
        **{"compile": False, "share_prompts": False, **ENGINES[engine][1]},
        # On a CPU inductor would need a C++ compiler and a minute, to try a script.
        backend="aot_eager" if arguments.tiny else "inductor",
        repeats=arguments.repeats,
        seed=arguments.seed,
    )


def row(engine: str, result: dict[str, Any]) -> str:
    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    tokens = result["tokens"]
    optimizer_s = result["optimizer_s"]
    cells = [
        engine,
        f"{result['update_s']:.3f}",
        f"{tokens / result['update_s']:,.0f}",
        share(result["update_mfu"]),
        f"{result['update_peak_gib']:.1f}",
        "not run" if optimizer_s is None else f"{optimizer_s:.3f}",
        f"{result['log_prob_s']:.3f}",
        f"{tokens / result['log_prob_s']:,.0f}",
        share(result["log_prob_mfu"]),
        f"{result['log_prob_peak_gib']:.1f}",
        f"{result['loss']:+.5f}",
        f"{result['update_log_prob']:.5f}",
        f"{result['log_prob']:.5f}",
        f"{result['grad_norm']:.5g}",
        f"{result['start_up_s']:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def disagreement(results: dict[str, dict[str, Any]]) -> str:
    """Return the largest relative differences between the results of two engines."""
    worst = {}
    for name in ("grad_norm", "update_log_prob", "log_prob"):
        values = [result[name] for result in results.values()]
        worst[name] = (max(values) - min(values)) / max(abs(value) for value in values)
    return ", ".join(f"{name} {value:.2%}" for name, value in worst.items())


def run_workload(
    arguments: argparse.Namespace, model: str, lengths: str, checkpointing: str
) -> dict[str, Any]:
    """Run all engines on one workload. Return the result of each, or its problem."""
    name = f"{lengths.replace(':', '-')}.checkpointing-{checkpointing}"
    results: dict[str, dict[str, Any]] = {}
    problems: dict[str, str] = {}
    job = make_job(arguments, model, lengths, checkpointing, arguments.engines[0])
    trained = f"LoRA {job.lora}" if job.lora else "all weights"
    print(
        f"\n{model}, rows {lengths} ({job.prompt_tokens} prompt), {job.samples} of a prompt, "
        f"{job.tokens:,} tokens in passes of {job.micro_tokens:,}, checkpointing {checkpointing}, "
        f"{trained}, {'with' if job.optimizer else 'without'} "
        f"optimizer\n{HEADER}\n|{'---|' * HEADER.count(' |')}",
        flush=True,
    )

    for engine in arguments.engines:
        job = make_job(arguments, model, lengths, checkpointing, engine)
        result = run_side(
            ENGINES[engine][0],
            job,
            arguments.out / model / name,
            engine,
            limit_s=arguments.limit_s,
            environment=ALLOCATOR,
        )
        if isinstance(result, str):
            problems[engine] = result
            print(f"| {engine} | FAILED: {result} |", flush=True)
        else:
            results[engine] = result
            print(row(engine, result), flush=True)

    if len(results) > 1:
        print(f"largest relative difference: {disagreement(results)}", flush=True)
        first, *peers = results
        for phase in ("update_s", "log_prob_s"):
            ratios = [
                f"{peer} {results[peer][phase] / results[first][phase]:.2f}" for peer in peers
            ]
            print(f"{phase} as a multiple of {first}'s: {', '.join(ratios)}", flush=True)

    return {"job": asdict(job), "results": results, "problems": problems}


def main() -> None:
    arguments = parse_arguments()
    arguments.out = arguments.out.resolve()
    if not arguments.tiny and not torch.cuda.is_available():
        raise SystemExit(
            "training.py needs a CUDA device, and PyTorch sees none. Try the script itself with "
            "--tiny."
        )

    start = time.perf_counter()
    reports = []
    for model in arguments.models:
        write_config(arguments.out / model / "model", model, "cpu" if arguments.tiny else "cuda")
        for lengths in arguments.lengths:
            for checkpointing in arguments.checkpointing:
                reports.append(run_workload(arguments, model, lengths, checkpointing))
                (arguments.out / "training.json").write_text(
                    json.dumps(reports, indent=2), encoding="utf-8"
                )

    versions = {result["versions"] for report in reports for result in report["results"].values()}
    print(f"\n{'; '.join(versions)}; {time.perf_counter() - start:.0f} s in all", flush=True)
    failed = [engine for report in reports for engine in report["problems"]]

    if failed:
        raise SystemExit(
            f"training.py: {', '.join(failed)} failed; the results of the others stand above."
        )


if __name__ == "__main__":
    main()
