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

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from decode_step import print_decode_steps
from floor import Machine, Shape, read_shape
from processes import run_python
from rollout_models import DTYPES, shape_of, write_config
from rollout_plan import IN_EIGHT_BITS, NAMES, SCRIPTS, Plan, parse_plan, refuse_what_cannot_run
from rollout_work import Job, Workload
from roofline import H200, Roofline, rollout_roofline

HERE = Path(__file__).parent


def measure_machine(plan: Plan) -> Machine:
    """Measure in a process of its own, so that no memory of the device stays with this one."""
    if not plan.measure:
        return H200
    log = plan.out / "roofline.log"
    problem = run_python([str(HERE / "roofline.py"), "--device", plan.device], log)
    if problem:
        raise SystemExit(
            f"The machine's speeds could not be measured: {problem}. To go on without: "
            "--no-measure."
        )
    return Machine(**json.loads(log.read_text(encoding="utf-8").splitlines()[-1]))


def run_side(plan: Plan, model: str, engine: str) -> dict[str, Any] | None:
    """Run one engine on all workloads; None where it fails."""
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
    problem = run_python(command, log, environment=environment)
    if problem:
        print(f"{model}: {NAMES[engine]} FAILED: {problem}", flush=True)
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
    """Print the table of workload `number`; returns its rows."""
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
    """Print the measurements of one model, and return them for the JSON."""
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
    problem = run_python(command, log)
    if problem:
        print(f"{model}: agreement in {kind} FAILED: {problem}", flush=True)
        return found

    found["kl"] = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
    for weights, values in found["kl"].items():
        shown = ", ".join(f"{name} {value:.3g}" for name, value in values.items())
        print(f"{model}, {weights}: {shown}", flush=True)
    return found


def run(plan: Plan) -> list[str]:
    """Run the plan; returns the names of failures."""
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
    plan = parse_plan(description=__doc__)
    plan = replace(plan, out=plan.out.resolve())
    refuse_what_cannot_run(plan)
    failures = run(plan)
    if failures:
        raise SystemExit(
            f"rollout.py: {', '.join(failures)} failed; the results of the others stand above."
        )


if __name__ == "__main__":
    main()
