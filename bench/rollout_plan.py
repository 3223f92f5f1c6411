"""The command line of `rollout.py`: engines, models and workloads, checked before anything runs."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from decode_step import workloads_of
from rollout_models import FAMILIES, SHAPES, is_known
from rollout_work import Workload, parse_lengths

SCRIPTS = {
    "ours": "rollout_ours.py",
    "ours-before": "rollout_ours.py",
    "ours-deterministic": "rollout_ours.py",
    "ours-fp8": "rollout_ours.py",
    "ours-int8": "rollout_ours.py",
    "ours-fp8kv": "rollout_ours.py",
    "ours-fp8both": "rollout_ours.py",
    "ours-int8kv": "rollout_ours.py",
    "ours-int8both": "rollout_ours.py",
    "vllm": "rollout_vllm.py",
    "hf": "rollout_hf.py",
}
NAMES = {
    "ours": "ours",
    "ours-before": "ours, before",
    "ours-deterministic": "ours, deterministic",
    "ours-fp8": "ours, fp8",
    "ours-int8": "ours, int8",
    "ours-fp8kv": "ours, fp8 keys and values",
    "ours-fp8both": "ours, fp8 weights, keys and values",
    "ours-int8kv": "ours, int8 keys and values",
    "ours-int8both": "ours, int8 weights, keys and values",
    "vllm": "vLLM",
    "hf": "transformers generate",
}
# Settings of the engines in eight bits.
IN_EIGHT_BITS: dict[str, dict[str, str]] = {
    "ours-fp8": {"quantization": "fp8"},
    "ours-int8": {"quantization": "int8"},
    "ours-fp8kv": {"kv_cache_dtype": "fp8"},
    "ours-fp8both": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "ours-int8kv": {"kv_cache_dtype": "int8"},
    "ours-int8both": {"quantization": "int8", "kv_cache_dtype": "int8"},
}
DEVICE_DEFAULTS = {
    "models": "1.5b",
    "lengths": "tail:1024",
    "prompts": 64,
    "samples": "16",
    "prompt_tokens": 256,
}
TINY_DEFAULTS = {
    "models": "tiny",
    "lengths": "tail:64",
    "prompts": 4,
    "samples": "2",
    "prompt_tokens": 16,
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The measurements that a command line asks for."""

    engines: tuple[str, ...]
    models: tuple[str, ...]
    workloads: tuple[Workload, ...]
    device: str
    max_num_seqs: int
    repeats: int
    seed: int
    measure: bool
    decode_step: bool
    before: Path | None
    vllm_inproc: bool
    out: Path


def parse_plan(words: Sequence[str] | None = None, description: str | None = None) -> Plan:
    """Return the plan of a command line; ends the program where it has none."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        help=f"of {', '.join((*SHAPES, *FAMILIES))}; several with commas, 8 layers by name@8 [1.5b]",
    )
    parser.add_argument(
        "--engines", help=f"of {', '.join(SCRIPTS)} [ours,vllm; with --tiny or --decode-step: ours]"
    )
    parser.add_argument("--hf", action="store_true", help="transformers too, as in --engines")

    parser.add_argument("--lengths", help="fixed:L or tail:L; several with commas [tail:1024]")
    parser.add_argument("--prompts", type=int, help="[64]")
    parser.add_argument("--samples", help="n, the samples of a prompt; several with commas [16]")
    parser.add_argument("--prompt-tokens", type=int, help="[256]")
    parser.add_argument(
        "--max-num-seqs", type=int, default=1024, help="rows that an engine may run at once [1024]"
    )
    parser.add_argument(
        "--repeats", type=int, help="timed runs, of which the best counts [2; 6 with --decode-step]"
    )

    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--decode-step",
        nargs="?",
        const="256",
        metavar="ROWS",
        help="one decode step instead of whole rollouts; several with commas [256]",
    )
    parser.add_argument(
        "--before", type=Path, help="checkout of this repository for the engine ours-before"
    )
    parser.add_argument(
        "--no-measure", action="store_true", help="take the speeds of an H200 for the bound"
    )
    parser.add_argument(
        "--vllm-inproc", action="store_true", help="vLLM's engine in the process of its caller"
    )

    parser.add_argument("--tiny", action="store_true", help="a tiny model and few tokens, on CPU")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/rollout"), help="folder for logs and JSON"
    )
    arguments = parser.parse_args(words)
    batch = {
        name: getattr(arguments, name)
        for name in ("lengths", "prompts", "samples", "prompt_tokens")
    }
    if arguments.decode_step and set(batch.values()) != {None}:
        parser.error(f"--decode-step has a batch of its own, got another by {batch}.")

    for name, value in (TINY_DEFAULTS if arguments.tiny else DEVICE_DEFAULTS).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)

    try:
        return make_plan(arguments)
    except ValueError as error:
        parser.error(str(error))


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Make the plan. Raises ValueError for a name or a number that means nothing."""
    engines = arguments.engines or (
        "ours" if arguments.tiny or arguments.decode_step else "ours,vllm"
    )
    chosen = [*engines.split(","), *(["hf"] if arguments.hf else [])]
    models = arguments.models.split(",")

    unknown = [name for name in chosen if name not in SCRIPTS]
    if unknown:
        raise ValueError(f"--engines must be of {', '.join(SCRIPTS)}, got '{unknown[0]}'.")
    unknown = [name for name in models if not is_known(name)]
    if unknown:
        known = ", ".join((*SHAPES, *FAMILIES))
        raise ValueError(f"--models must be of {known}, got '{unknown[0]}'.")

    if ("ours-before" in chosen) != (arguments.before is not None):
        raise ValueError("The engine ours-before and --before DIR need each other.")

    samples = _numbers(arguments.samples)
    # A decode step is a difference of two best runs: both must have met the machine at its best.
    repeats = (
        (6 if arguments.decode_step else 2) if arguments.repeats is None else arguments.repeats
    )
    counts = [*samples, arguments.prompts, arguments.prompt_tokens, arguments.max_num_seqs, repeats]

    if min(counts) < 1:
        raise ValueError(
            "--prompts, --samples, --prompt-tokens, --max-num-seqs and --repeats must be at least "
            f"1, got {arguments.prompts}, {arguments.samples}, {arguments.prompt_tokens}, "
            f"{arguments.max_num_seqs} and {repeats}."
        )

    if arguments.decode_step:
        row_counts = _numbers(arguments.decode_step)
        if not 1 <= min(row_counts) <= max(row_counts) <= arguments.max_num_seqs:
            raise ValueError(
                "--decode-step needs numbers of rows that run at once, up to --max-num-seqs "
                f"({arguments.max_num_seqs}), got {arguments.decode_step}."
            )
        workloads = [workload for rows in row_counts for workload in workloads_of(rows)]
    else:
        workloads = [
            Workload(
                prompts=arguments.prompts,
                samples=n,
                prompt_tokens=arguments.prompt_tokens,
                lengths=lengths,
            )
            for lengths in arguments.lengths.split(",")
            for n in samples
        ]

    for workload in workloads:
        parse_lengths(workload.lengths)
    return Plan(
        engines=tuple(dict.fromkeys(chosen)),
        models=tuple(models),
        workloads=tuple(workloads),
        device="cpu" if arguments.tiny else "cuda",
        max_num_seqs=arguments.max_num_seqs,
        repeats=repeats,
        seed=arguments.seed,
        measure=not arguments.no_measure,
        decode_step=arguments.decode_step is not None,
        before=arguments.before,
        vllm_inproc=arguments.vllm_inproc,
        out=arguments.out,
    )


def _numbers(text: str) -> list[int]:
    """Return numbers with commas between them, 0 for each that is none."""
    return [int(number) if number.isdecimal() else 0 for number in text.split(",")]


def refuse_what_cannot_run(plan: Plan) -> None:
    """Raise SystemExit where an engine or the device is missing."""
    if "vllm" in plan.engines and importlib.util.find_spec("vllm") is None:
        raise SystemExit(
            "rollout.py: the engine 'vllm' was asked for and the package vLLM is not installed. "
            f"Install it: {sys.executable} -m pip install vllm==0.24.0; or leave it out: --engines "
            "ours"
        )

    if plan.before is not None and not (plan.before / "bench" / "rollout_ours.py").is_file():
        raise SystemExit(f"rollout.py: --before must be a checkout of verl, got {plan.before}.")

    if plan.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "rollout.py needs a CUDA device, and PyTorch sees none. Try the script itself with "
            "--tiny."
        )

    if plan.device == "cpu" and any(engine in IN_EIGHT_BITS for engine in plan.engines):
        raise SystemExit("rollout.py: --tiny runs on CPU, where the engine has no eight bits.")

    if plan.device == "cpu" and "vllm" in plan.engines:
        raise SystemExit(
            "rollout.py: --tiny runs on CPU, where vLLM is not measured. Take --engines ours,hf."
        )
