"""A whole GRPO step on one CUDA device, phase by phase: our trainer and its peers.

| engine | what it is |
|---|---|
| ours | verl's trainer with its embedded rollout engine |
| assembled | vLLM that sleeps between rollouts, and a packed, compiled transformers update |
| trl | TRL's GRPOTrainer in transformers mode |
| verl | the published verl with vLLM, in a process that cannot see this package; see PEERS.md |

Random weights of a Qwen2.5 shape, prompts of random tokens, forced response lengths, no KL, one
optimizer step; fp32 parameters and moments, bf16 compute. Every engine runs in a process of its
own, one after the other, with a time limit. The whole batch is one update, so old log-probs are
those of the update, unless `--old-log-probs` asks for their pass (TRL decides by itself). The first
step is a warm-up; phases are means over the others.

TRL may take minutes: with `--trl-prompts` it gets fewer prompts, and its times are scaled to all of
them, as the table says. Run `python bench/step.py`, or for example `python bench/step.py --engines
ours,assembled,trl --trl-prompts 16`; `--tiny` tries the script on CPU. Jobs, results and logs are
in the folder `--out`.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# the package next to this folder, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_step import write_model
from processes import run_python, run_side
from rollout_models import SHAPES
from rollout_work import parse_lengths
from step_work import StepJob

HERE = Path(__file__).parent
ENGINES = {
    "ours": "step_ours.py",
    "assembled": "step_assembled.py",
    "trl": "step_trl.py",
    "verl": "step_verl.py",
}
NEEDS = {"assembled": ("vllm", "vllm==0.24.0"), "trl": ("trl", "trl")}
END_OF_LOG = 40  # lines of a failed engine's log
PEER_MARGIN_S = 90.0  # for the script around the peer verl: inputs, and ending its processes
PHASES = ("generate", "old log-probs", "update", "weights", "rest", "step")
DEVICE_DEFAULTS = {
    "prompts": 64,
    "samples": 16,
    "prompt_tokens": 256,
    "new_tokens": 1024,
    "micro_tokens": 16_384,
}
TINY_DEFAULTS = {
    "prompts": 4,
    "samples": 2,
    "prompt_tokens": 16,
    "new_tokens": 12,
    "micro_tokens": 100,
}


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_work_arguments(parser)
    add_peer_arguments(parser)
    parser.add_argument(
        "--limit-s", type=float, default=500.0, help="time limit of an engine [500]"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few tokens, on CPU")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/step"), help="folder for model, logs and JSON"
    )
    parser.add_argument(
        "--write-model", action="store_true", help="write the model into --out and nothing else"
    )

    arguments = parser.parse_args(words)
    complete(arguments)
    try:
        check(arguments)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of all engines."""
    parser.add_argument(
        "--engines", help="see above; several with commas [ours,assembled; with --tiny: ours]"
    )
    parser.add_argument("--model", default="1.5b", help=f"of {', '.join(SHAPES)} [1.5b]")

    parser.add_argument("--prompts", type=int, help="[64]")
    parser.add_argument("--samples", type=int, help="responses a prompt, at least 2 [16]")
    parser.add_argument("--prompt-tokens", type=int, help="[256]")
    parser.add_argument("--new-tokens", type=int, help="of the longest response [1024]")
    parser.add_argument("--lengths", help="of responses: fixed:L or tail:L [fixed:NEW_TOKENS]")
    parser.add_argument("--micro-tokens", type=int, help="of a forward-backward pass [16384]")
    parser.add_argument("--steps", type=int, default=2, help="the first is a warm-up [2]")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument(
        "--old-log-probs", action="store_true", help="a pass for them before the update"
    )
    parser.add_argument("--seed", type=int, default=0)


def add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the engines that ours is compared with."""
    parser.add_argument(
        "--peer-micro-tokens", type=int, help="of the others' passes, if they have room for less"
    )
    parser.add_argument(
        "--vllm-memory", type=float, default=0.6, help="share of the device for vLLM [0.6]"
    )

    parser.add_argument("--trl-prompts", type=int, help="prompts that TRL gets, if not all")
    parser.add_argument(
        "--trl-steps", type=int, help="steps that TRL makes, if not --steps; 1 counts its first one"
    )

    parser.add_argument("--verl-site", help="folder with the peer's package verl")
    parser.add_argument("--verl-python", help="interpreter of the peer verl [this one]")
    parser.add_argument(
        "--verl-attention", default="sdpa", help="sdpa, eager, flash_attention_2, ... [sdpa]"
    )
    parser.add_argument(
        "--verl-set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a further key of the peer's configuration; may be repeated",
    )
    parser.add_argument("--verl-steps", type=int, default=3, help="the first is a warm-up [3]")
    parser.add_argument(
        "--verl-timeout",
        type=float,
        default=540.0,
        help="seconds for its start and all of its steps [540]",
    )


def complete(arguments: argparse.Namespace) -> None:
    """Fill in the defaults, which depend on --tiny."""
    for name, value in (TINY_DEFAULTS if arguments.tiny else DEVICE_DEFAULTS).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)

    if arguments.tiny:
        arguments.model = "tiny"
    usual = "ours" if arguments.tiny else "ours,assembled"
    arguments.engines = (arguments.engines or usual).split(",")
    arguments.peer_micro_tokens = arguments.peer_micro_tokens or arguments.micro_tokens
    arguments.lengths = arguments.lengths or f"fixed:{arguments.new_tokens}"


def check(arguments: argparse.Namespace) -> None:
    """Raise ValueError for an unknown name or a number that is out of range."""
    for option, names, known in (
        ("engines", arguments.engines, ENGINES),
        ("model", [arguments.model], SHAPES),
    ):
        for name in names:
            if name not in known:
                raise ValueError(f"--{option} must be of {', '.join(known)}, got '{name}'.")

    if "verl" in arguments.engines:
        check_peer(arguments)

    _, longest = parse_lengths(arguments.lengths)
    fewest = min(arguments.micro_tokens, arguments.peer_micro_tokens)
    if longest + arguments.prompt_tokens > fewest:
        raise ValueError(
            f"A pass must hold a row of {longest + arguments.prompt_tokens} tokens, got {fewest}."
        )

    if min(arguments.steps, arguments.samples) < 2:
        raise ValueError(
            f"--steps and --samples must be at least 2, got {arguments.steps} and "
            f"{arguments.samples}."
        )


def check_peer(arguments: argparse.Namespace) -> None:
    """Raise ValueError unless the peer verl has a place of its own."""
    if arguments.verl_site is None and arguments.verl_python is None:
        raise ValueError(
            "The engine verl needs --verl-site FOLDER, with its package and what it needs, or "
            "--verl-python of an environment that has it."
        )

    if arguments.verl_site is not None:
        site = Path(arguments.verl_site).resolve()
        if not (site / "verl").is_dir() or site == HERE.parent:
            raise ValueError(f"--verl-site must hold the peer's folder verl, got '{site}'.")

    for word in arguments.verl_set:
        if "=" not in word:
            raise ValueError(f"--verl-set must be KEY=VALUE, got '{word}'.")

    if arguments.verl_steps < 2:
        raise ValueError(f"--verl-steps must be at least 2, got {arguments.verl_steps}.")


def make_job(arguments: argparse.Namespace, engine: str) -> StepJob:
    job = StepJob(
        folder=str(arguments.out),
        device="cpu" if arguments.tiny else "cuda",
        vocabulary=SHAPES[arguments.model]["vocab_size"],
        prompts=arguments.prompts,
        samples=arguments.samples,
        prompt_tokens=arguments.prompt_tokens,
        lengths=arguments.lengths,
        steps=arguments.steps,
        micro_tokens=arguments.micro_tokens if engine == "ours" else arguments.peer_micro_tokens,
        checkpointing=not arguments.no_checkpointing,
        old_log_probs=arguments.old_log_probs,
        vllm_memory=arguments.vllm_memory,
        backend="aot_eager" if arguments.tiny else "inductor",
        seed=arguments.seed,
    )

    if engine == "trl":
        prompts = arguments.trl_prompts or job.prompts
        steps = arguments.trl_steps or job.steps
        job = replace(job, prompts=prompts, steps=steps)

    if engine == "verl":
        site = arguments.verl_site
        job = replace(
            job,
            steps=arguments.verl_steps,
            verl_python=arguments.verl_python or "",
            verl_site=str(Path(site).resolve()) if site else "",
            verl_attention=arguments.verl_attention,
            verl_set=tuple(arguments.verl_set),
            verl_timeout_s=arguments.verl_timeout,
        )

    return job


def run_engine(arguments: argparse.Namespace, engine: str) -> dict[str, Any] | str:
    """Return the result of an engine, or one line that says why there is none."""
    if engine in NEEDS and importlib.util.find_spec(NEEDS[engine][0]) is None:
        package, install = NEEDS[engine]
        return f"the package {package} is not installed: {sys.executable} -m pip install {install}"

    limit_s = arguments.limit_s
    if engine == "verl":
        limit_s = arguments.verl_timeout + PEER_MARGIN_S  # it has a limit of its own
    job = make_job(arguments, engine)
    result = run_side(ENGINES[engine], job, arguments.out, engine, limit_s=limit_s)
    if isinstance(result, str) and engine == "verl":
        print_end(arguments.out / f"{engine}.log")
    return result


def print_end(log: Path) -> None:
    """Print the last lines of a log, for an error whose cause stands above its last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    print(f"The end of {log}:", *lines[-END_OF_LOG:], sep="\n  ", flush=True)


def phases(arguments: argparse.Namespace, engine: str, result: dict[str, Any]) -> dict[str, float]:
    """Return mean seconds of every phase after the warm-up, scaled to all prompts."""
    counted = result["steps"][1:] or result["steps"]
    scale = arguments.prompts / make_job(arguments, engine).prompts
    means = {
        name: scale * sum(step.get(name, 0.0) for step in counted) / len(counted) for name in PHASES
    }
    means["rest"] = means["step"] - sum(
        means[name] for name in PHASES if name not in ("rest", "step")
    )
    return means


def print_table(arguments: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    columns = {engine: phases(arguments, engine, result) for engine, result in results.items()}
    first = next(iter(columns))
    peers = [engine for engine in columns if engine != first]
    scaled = {engine: arguments.prompts / make_job(arguments, engine).prompts for engine in columns}
    names = [
        f"{engine} (x {scaled[engine]:g})" if scaled[engine] != 1 else engine for engine in columns
    ]
    heads = ["seconds", *names, *(f"{peer} / {first}" for peer in peers)]

    print("\n| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for phase in PHASES:
        cells = [f"{column[phase]:.3f}" for column in columns.values()]
        ratios = [
            f"{columns[peer][phase] / columns[first][phase]:.2f}"
            if columns[first][phase] > 1e-3
            else ""
            for peer in peers
        ]
        print("| " + " | ".join([phase, *cells, *ratios]) + " |")

    for engine, factor in scaled.items():
        if factor != 1:
            given = f"{arguments.prompts / factor:g} of {arguments.prompts}"
            print(f"{engine} ran {given} prompts; its times are x {factor:g}.")
        if len(results[engine]["steps"]) == 1:
            print(f"{engine} made one step, which is its warm-up too.")


def describe(arguments: argparse.Namespace, engine: str, result: dict[str, Any]) -> str:
    """Return the line that is printed as soon as an engine is done."""
    seconds = phases(arguments, engine, result)
    parts = ", ".join(f"{name} {seconds[name]:.3f}" for name in PHASES if seconds[name])
    details = {
        name: value
        for name, value in result.items()
        if name not in ("steps", "versions", "peak_gib")
    }
    return (
        f"{engine}: {parts} s; warm-up step {result['steps'][0]['step']:.1f} s; device peak "
        f"{result['peak_gib']:.1f} GiB; {details}; {result['versions']}"
    )


def write_model_apart(arguments: argparse.Namespace) -> None:
    """Write the model in a process of its own, so that no memory of the device stays with this one.

    Raises SystemExit if it fails.
    """
    command = [str(Path(__file__).resolve()), "--write-model"]
    command += ["--out", str(arguments.out), "--model", arguments.model]
    if arguments.tiny:
        command.append("--tiny")

    log = arguments.out / "model.log"
    problem = run_python(command, log, limit_s=arguments.limit_s)
    if problem:
        raise SystemExit(f"step.py: the model could not be written: {problem}")


def run_engines(arguments: argparse.Namespace) -> dict[str, str]:
    """Run the engines and print their table. Return the problems of those that failed."""
    jobs = {engine: asdict(make_job(arguments, engine)) for engine in arguments.engines}
    results: dict[str, dict[str, Any]] = {}
    problems: dict[str, str] = {}
    for engine in arguments.engines:
        result = run_engine(arguments, engine)
        if isinstance(result, str):
            problems[engine] = result
            print(f"{engine}: FAILED: {result}", flush=True)
        else:
            results[engine] = result
            print(describe(arguments, engine, result), flush=True)
        everything = {"jobs": jobs, "results": results, "problems": problems}
        (arguments.out / "step.json").write_text(json.dumps(everything, indent=2), encoding="utf-8")

    if results:
        print_table(arguments, results)
    return problems


def main() -> None:
    arguments = parse_arguments()
    arguments.out = arguments.out.resolve()
    device = torch.device("cpu" if arguments.tiny else "cuda")
    if not arguments.tiny and not torch.cuda.is_available():
        raise SystemExit(
            "step.py needs a CUDA device, and PyTorch sees none. Try the script itself with --tiny."
        )
    if arguments.write_model:
        write_model(arguments.out / "model", SHAPES[arguments.model], device)
        return

    write_model_apart(arguments)
    print(
        f"{arguments.model}: {arguments.prompts} prompts x {arguments.samples} samples, "
        f"{arguments.prompt_tokens} + {arguments.lengths} tokens, passes of "
        f"{arguments.micro_tokens} (others {arguments.peer_micro_tokens}), checkpointing "
        f"{'off' if arguments.no_checkpointing else 'on'}, {arguments.steps} steps",
        flush=True,
    )
    start = time.perf_counter()
    problems = run_engines(arguments)
    print(f"{time.perf_counter() - start:.0f} s in all", flush=True)
    if problems:
        raise SystemExit(
            f"step.py: {', '.join(problems)} failed; the results of the others stand above."
        )


if __name__ == "__main__":
    main()
