"""Rollout speed on one CUDA device: the embedded engine, vLLM and `generate` of transformers on the
same prompts.

Every engine runs in a process of its own, one after the other, on random weights of a Qwen2.5
shape. All get the same prompts of random tokens and the same length of every sample
(`rollout_work.py` says how lengths are drawn), temperature 1 and, ours and vLLM, the log-probs of
the drawn tokens. A short run warms an engine up; then each repeat has prompts that no prefix cache
knows, and the best repeat counts. Next to the seconds stands the bound of `roofline.py`, from speeds
measured here.

Run `python bench/rollout.py`, or for example with `--models 0.5b,1.5b,7b --samples 1,8,16 --engines
ours,vllm,hf --lengths fixed:256,tail:1024`; `--decode-step 64,256` measures one decode step of ours
at so many rows instead. `--engines ours,ours-before --before DIR` compares ours to another checkout
of this repository. With `--engines ours,ours-fp8,ours-fp8kv,ours-fp8both` the ratios of times and the KLs
per token (`agreement_eight_bits.py`) of eight-bit weights, of eight-bit keys and values, and of both,
follow; the bound is that of bfloat16 for all. `int8` in place of `fp8` is the other format. `--tiny`
tries the script on CPU. The jobs, the results as JSON and the logs of the engines lie in the folder `--out`.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from decode_step import print_decode_steps, workloads_of
from floor import Machine, Shape, read_shape
from rollout_models import DTYPES, FAMILIES, SHAPES, is_known, shape_of, write_config
from rollout_work import Job, Workload, parse_lengths
from roofline import H200, Roofline, rollout_roofline

HERE = Path(__file__).parent
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
LOG_TAIL = 3000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the command line asks for."""

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


def parse_plan(words: Sequence[str] | None = None) -> Plan:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    """Raises ValueError for a name or a number that means nothing."""
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
    """Numbers with commas between them, 0 for what is none."""
    return [int(number) if number.isdecimal() else 0 for number in text.split(",")]


def refuse_what_cannot_run(plan: Plan) -> None:
    """Raises SystemExit before anything has run, where an engine or the device is missing."""
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


def run_process(
    command: Sequence[str],
    log: Path,
    environment: dict[str, str] | None = None,
    *,
    python: str = sys.executable,
) -> bool:
    """Run a script of ours with its output in `log`; False, with the log's end printed, where it
    fails."""
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            [python, *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    if done.returncode != 0:
        tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
        print(
            f"{Path(command[0]).name} ended with code {done.returncode}; the end of {log}:\n{tail}",
            flush=True,
        )
    return done.returncode == 0


def measure_machine(plan: Plan) -> Machine:
    """In a process of its own, so that no memory of the device stays with this one."""
    if not plan.measure:
        return H200
    log = plan.out / "roofline.log"
    if not run_process([str(HERE / "roofline.py"), "--device", plan.device], log):
        raise SystemExit(
            "The machine's speeds could not be measured. To go on without: --no-measure."
        )
    return Machine(**json.loads(log.read_text(encoding="utf-8").splitlines()[-1]))


def run_side(plan: Plan, model: str, engine: str) -> dict[str, Any] | None:
    """One engine on all workloads; None where it fails."""
    folder = plan.out / model
    job = Job(
        folder=str(folder / "model"),
        device=plan.device,
        vocabulary=shape_of(model)["vocab_size"],
        max_num_seqs=plan.max_num_seqs,
        gpu_memory_utilization=0.85,
        deterministic=engine == "ours-deterministic",
        **IN_EIGHT_BITS.get(engine, {}),
        repeats=plan.repeats,
        seed=plan.seed,
        workloads=plan.workloads,
    )

    job.write(folder / f"{engine}.job.json")
    answer = folder / f"{engine}.json"
    log = folder / f"{engine}.log"
    answer.unlink(missing_ok=True)
    scripts = HERE
    if engine == "ours-before":
        assert plan.before is not None, "the plan was checked"
        scripts = plan.before / "bench"
    command = [
        str(scripts / SCRIPTS[engine]),
        "--job",
        str(folder / f"{engine}.job.json"),
        "--json",
        str(answer),
    ]

    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if plan.vllm_inproc else {}
    start = time.perf_counter()
    if not run_process(command, log, environment):
        return None
    result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    result["process_s"] = time.perf_counter() - start
    print(f"{model}: {NAMES[engine]} done in {result['process_s']:.1f} s, log: {log}", flush=True)

    return result


def workload_roofline(plan: Plan, workload: Workload, machine: Machine, shape: Shape) -> Roofline:
    return rollout_roofline(
        machine,
        shape,
        workload.limits(plan.seed).ravel(),
        prompts=workload.prompts,
        prompt_tokens=workload.prompt_tokens,
        max_num_seqs=plan.max_num_seqs,
        dtype_bytes=DTYPES[plan.device].itemsize,
    )


def print_table(
    title: str, bound: Roofline, results: dict[str, dict[str, Any]], number: int
) -> dict[str, dict[str, float]]:
    """The table of workload `number`; gives its rows."""
    print(f"\n{title}")
    print(
        "| engine | tok/s | seconds | ratio to vLLM | of the roofline | start-up s "
        "|\n|---|---|---|---|---|---|"
    )
    best = {
        engine: min(result["workloads"][number]["seconds"]) for engine, result in results.items()
    }

    rows = {}
    for engine, seconds in best.items():
        tokens = results[engine]["workloads"][number]["tokens"]
        rows[engine] = {
            "tokens_per_s": tokens / seconds,
            "seconds": seconds,
            "of_roofline": bound.total_s / seconds,
            "start_up_s": results[engine]["start_up_s"],
        }
        ratio = ""
        if "vllm" in best:
            rows[engine]["ratio_to_vllm"] = best["vllm"] / seconds
            ratio = f"{best['vllm'] / seconds:.2f}"
        print(
            f"| {NAMES[engine]} | {tokens / seconds:,.0f} | {seconds:.3f} | {ratio} | "
            f"{bound.total_s / seconds:.1%} | {results[engine]['start_up_s']:.1f} |"
        )

    print(
        f"roofline: {bound.total_s:.3f} s = prefill {bound.prefill_s:.3f} + {bound.decode_steps} "
        f"decode steps, weights {bound.weights_s:.3f} and cache {bound.cache_s:.3f}"
    )
    for engine, result in results.items():
        measured = result["workloads"][number]
        print(
            f"{NAMES[engine]}: runs "
            f"{', '.join(f'{seconds:.3f}' for seconds in measured['seconds'])} s, warm-up "
            f"{measured['warm_up_s']:.3f} s"
        )
        if measured["statistics"]:
            print(
                "  "
                + ", ".join(
                    f"{name} {value:,.6g}" for name, value in measured["statistics"].items()
                )
            )

    return rows


def report_model(
    plan: Plan, model: str, machine: Machine, results: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Print what was measured of one model; gives it for the JSON."""
    shape = read_shape(plan.out / model / "model")
    bounds = [workload_roofline(plan, workload, machine, shape) for workload in plan.workloads]
    report: dict[str, Any] = {"sides": results, "rooflines": [asdict(bound) for bound in bounds]}
    if plan.decode_step:
        best = {
            engine: [min(workload["seconds"]) for workload in result["workloads"]]
            for engine, result in results.items()
        }
        report["decode_step"] = print_decode_steps(model, plan.workloads, bounds, best, NAMES)
    else:
        report["tables"] = {
            workload.name: print_table(f"{model}, {workload.name}", bound, results, number)
            for number, (workload, bound) in enumerate(zip(plan.workloads, bounds))
        }
    for engine, result in results.items():
        print(f"{NAMES[engine]}: {result['versions']}")
    for engine in sorted(IN_EIGHT_BITS.keys() & results.keys()):
        if "ours" in results:
            report[engine.removeprefix("ours-")] = compare_eight_bits(plan, model, results, engine)
    return report


def compare_eight_bits(
    plan: Plan, model: str, results: dict[str, dict[str, Any]], engine: str
) -> dict[str, Any]:
    """Print how much faster an engine in eight bits is than bfloat16, and how far off."""
    kind = engine.removeprefix("ours-")
    found: dict[str, Any] = {}
    for number, workload in enumerate(plan.workloads):
        seconds = []
        for name in ("ours", engine):
            seconds.append(min(results[name]["workloads"][number]["seconds"]))
        found[workload.name] = seconds[0] / seconds[1]
        print(
            f"{kind} at {model}, {workload.name}: {seconds[0]:.3f} s in bfloat16, {seconds[1]:.3f} "
            f"s in {kind}, {seconds[0] / seconds[1]:.3f} times as fast",
            flush=True,
        )

    log = plan.out / model / f"agreement_{kind}.log"
    command = [str(HERE / "agreement_eight_bits.py"), str(plan.out / model / "model")]
    command += ["--kind", kind]
    if run_process(command, log):
        found["kl"] = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
        for weights, values in found["kl"].items():
            shown = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
            print(f"{model}, {weights}: {shown}", flush=True)
    return found


def run(plan: Plan) -> list[str]:
    """Everything of the plan; gives what has failed."""
    plan.out.mkdir(parents=True, exist_ok=True)
    machine = measure_machine(plan)
    source = "measured" if plan.measure else "assumed"
    print(
        f"{source}: {machine.gflops / 1e3:,.3g} TFLOP/s, {machine.gb_per_s:,.0f} GB/s", flush=True
    )
    failures = []
    reports = {}

    for model in plan.models:
        write_config(plan.out / model / "model", model, plan.device)
        results = {}
        for engine in plan.engines:
            result = run_side(plan, model, engine)
            if result is None:
                failures.append(f"{NAMES[engine]} at {model}")
            else:
                results[engine] = result
                # At once: a machine that is lent for a time may be gone before the table.
                for workload, measured in zip(plan.workloads, result["workloads"], strict=True):
                    seconds = min(measured["seconds"])
                    speed = measured["tokens"] / seconds
                    print(
                        (
                            f"{model}, {workload.name}: {NAMES[engine]} {seconds:.3f} s, "
                            f"{speed:,.0f} tok/s"
                        ),
                        flush=True,
                    )
        if results:
            reports[model] = report_model(plan, model, machine, results)
        plan_values = {**asdict(plan), "out": str(plan.out), "before": str(plan.before)}
        everything = {
            "plan": plan_values,
            "machine": asdict(machine),
            "failures": failures,
            "models": reports,
        }
        (plan.out / "rollout.json").write_text(json.dumps(everything, indent=2), encoding="utf-8")

    return failures


def main() -> None:
    plan = parse_plan()
    plan = replace(plan, out=plan.out.resolve())
    refuse_what_cannot_run(plan)
    failures = run(plan)
    if failures:
        raise SystemExit(
            f"rollout.py: {', '.join(failures)} failed; what the others gave stands above."
        )


if __name__ == "__main__":
    main()
