"""Long tails: asynchronous training against the synchronous step, on one device or several.

A random model of Qwen2.5-1.5B's shape, prompts of 256 random tokens, responses of forced lengths
with a long tail, one optimizer step a batch. Every prompt has the same lengths under both
schedules, so both train on the same responses. The first steps are a warm-up and the last ones
drain the responses that were generated ahead; neither is counted.

| schedule | one device | `--ranks N`, under torchrun |
|---|---|---|
| sync | generates, then learns | all ranks generate, then all learn |
| fully_async | both in time slices | the last `--generators` ranks generate, the others learn |

    python bench/async_timeslice.py --prompts 64 --samples 16 --new-tokens 8192
    python bench/async_timeslice.py --prompts 32 --new-tokens 4096 --ranks 2
    python bench/async_timeslice.py --tiny --ranks 2          tries the script on CPU, under gloo

Each schedule runs in processes of its own, with the time limit `--limit-s`. The steps that ended
before a failure count. The last table is of the simulator, see `schedule_sim.py`.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# the package next to this folder, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_step import RandomPrompts, even_share, make_config, write_model
from processes import run_python
from rollout_models import SHAPES
from schedule_sim import add_costs
from timeslice_report import (
    Line,
    Measured,
    comparison,
    imposed_tokens,
    lengths_of_step,
    measured,
    predictions,
    read_lines,
    table,
)

from verl.config.load import config_from_dict, config_to_dict
from verl.rollout import Request
from verl.rollout.embedded.engine import EmbeddedEngine
from verl.trainer.variants import trainer_class

SCRIPT = str(Path(__file__).resolve())
SCHEDULES = ("sync", "fully_async")
TINY = {"prompts": 4, "samples": 2, "prompt_tokens": 16, "new_tokens": 48, "micro_tokens": 200}
MODEL = "model"  # the job that writes the model


def impose_lengths(given: argparse.Namespace) -> None:
    """Give every sample its length: a function of the batch of its prompt, its row and number.

    All ranks run this script, so the engines of all ranks do this.
    """
    submit = EmbeddedEngine.submit
    lengths: dict[int, Any] = {}

    def limit_of(step: int, number: int) -> int:
        if step not in lengths:
            lengths[step] = lengths_of_step(given, step)
        return int(lengths[step][number])

    def limited(
        engine: EmbeddedEngine, requests: list[Request], params: Any, *, seed: int, step: int
    ) -> None:
        asked = []
        for request in requests:
            if request.continuations is None:
                limits = [limit_of(step, number) for number in request.sample_ids]
            else:
                limits = [limit_of(each.step, each.number) for each in request.continuations]
            asked.append(replace(request, limits=tuple(limits)))
        submit(engine, asked, params, seed=seed, step=step)

    engine_class: Any = EmbeddedEngine
    engine_class.submit = limited


def train(given: argparse.Namespace) -> None:
    """Train with one schedule; the metrics are in the folder of the run.

    Under torchrun all ranks call it. The trainer's constructor returns on rank 0 alone, and each
    rank takes the device of its LOCAL_RANK.
    """
    folder = given.out / given.only
    values = config_to_dict(make_config(given, folder, device_of(given)))
    values["actor_rollout_ref"]["model"]["path"] = str(model_folder(given))
    values["trainer"]["mode"] = given.only
    values["async_training"]["staleness_threshold"] = given.staleness
    if given.max_staleness is not None:
        values["async_training"]["max_staleness"] = given.max_staleness
    if given.keep_kv_cache:
        values["async_training"]["keep_kv_cache"] = True
        values["actor_rollout_ref"]["rollout"]["free_cache_engine"] = False
    values["actor_rollout_ref"]["rollout"]["max_num_seqs"] = given.max_num_seqs
    values["actor_rollout_ref"]["rollout"]["gpu_memory_utilization"] = given.memory
    if given.ranks > 1 and given.only == "fully_async":
        generators = range(given.ranks - given.generators, given.ranks)
        values["trainer"]["placement"]["rollout"] = list(generators)
    # The same passes under both schedules: the ratio is against the rollout's log-probs.
    values["algorithm"]["rollout_correction"]["bypass_mode"] = True
    config = config_from_dict(values)

    impose_lengths(given)
    trainer = trainer_class(config)(
        config,
        reward_fn=even_share,
        val_reward_fn=even_share,
        train_dataset=RandomPrompts(
            given.prompts * given.steps, given.prompt_tokens, SHAPES[given.model]["vocab_size"]
        ),
    )
    trainer.init_workers()
    trainer.fit()


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="1.5b", help=f"of {', '.join(SHAPES)} [1.5b]")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=8192, help="of the longest response")
    parser.add_argument("--micro-tokens", type=int, default=32_768)
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--memory", type=float, default=0.8, help="rollout.gpu_memory_utilization")
    parser.add_argument("--staleness", type=float, default=1.0, help="staleness_threshold")
    parser.add_argument("--max-staleness", type=int, help="[staleness, rounded up]")
    parser.add_argument(
        "--keep-kv-cache", action="store_true", help="of frozen responses, in memory of its own"
    )
    parser.add_argument("--warm-up", type=int, default=1, help="steps")
    parser.add_argument("--counted", type=int, default=2, help="steps")
    parser.add_argument("--drained", type=int, default=1, help="steps")
    parser.add_argument("--ranks", type=int, default=1, help="devices of this machine [1]")
    parser.add_argument("--generators", type=int, default=1, help="ranks of fully_async's rollout")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="by commas")
    parser.add_argument("--limit-s", type=float, default=580.0, help="time limit of a schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on CPU")
    parser.add_argument("--out", type=Path, default=Path("outputs/timeslice"))
    parser.add_argument(
        "--only",
        choices=(*SCHEDULES, MODEL),
        help="run this schedule with the model of an earlier call",
    )
    add_costs(parser)

    given = parser.parse_args(words)
    if given.ranks > 1 and not 0 < given.generators < given.ranks:
        parser.error(
            f"--generators must be from 1 to {given.ranks - 1}, as --ranks is {given.ranks}, got "
            f"{given.generators}."
        )
    if given.tiny:
        vars(given).update(TINY, model="tiny")
    given.out = given.out.resolve()
    given.steps = given.warm_up + given.counted + given.drained
    return given


def device_of(given: argparse.Namespace) -> torch.device:
    return torch.device("cpu" if given.tiny else "cuda")


def model_folder(given: argparse.Namespace) -> Path:
    return given.out / f"model-{given.model}"


def prepare(given: argparse.Namespace, words: list[str]) -> None:
    """Write the model once, with as many positions as the longest response needs.

    In a process of its own, which leaves no context and no memory on a device.
    """
    folder = model_folder(given)
    is_whole = (folder / "tokenizer_config.json").is_file()  # written last
    if not is_whole:
        command = [SCRIPT, "--only", MODEL, *words]
        problem = run_python(command, given.out / "model.log", limit_s=given.limit_s)
        if problem:
            raise SystemExit(f"The model was not written: {problem}")

    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["max_position_embeddings"] = given.prompt_tokens + given.new_tokens
    file.write_text(json.dumps(config), encoding="utf-8")


def run_schedule(
    given: argparse.Namespace, schedule: str, words: list[str]
) -> tuple[list[Line], str | None]:
    """Train in processes of their own. Return the metrics of the steps that ended, and a problem."""
    command = [SCRIPT, "--only", schedule, *words]
    if given.ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, f"--nproc-per-node={given.ranks}", *command]
    file = given.out / schedule / "run" / "metrics.jsonl"
    file.unlink(missing_ok=True)

    problem = run_python(command, given.out / f"{schedule}.log", limit_s=given.limit_s)
    lines = read_lines(file)
    tokens = sum(line["perf/total_num_tokens"] for line in lines)
    if problem is None and tokens != imposed_tokens(given):
        problem = f"trained {tokens:,.0f} tokens instead of {imposed_tokens(given):,}"
    return lines, problem


def report(given: argparse.Namespace, lines_of: dict[str, list[Line]]) -> None:
    """Print the tables, and write the file."""
    results: dict[str, Measured] = {}
    for schedule, lines in lines_of.items():
        result = measured(given, lines)
        if result is not None:
            results[schedule] = result
    if not results:
        return

    values: dict[str, dict[str, Any]] = {}
    for schedule, result in results.items():
        values[schedule] = asdict(result) | {"tokens_per_s": result.tokens_per_s}
    (given.out / "timeslice.json").write_text(json.dumps(values, indent=1), encoding="utf-8")

    print("\n" + "\n".join(table(results)), flush=True)
    if "sync" in results and "fully_async" in results:
        sync = results["sync"]
        ours = results["fully_async"]
        print("\n" + comparison(ours, sync) + "\n")
        print("\n".join(predictions(given, lines_of["sync"], sync, ours)))


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    given = parse_arguments(words)
    if given.only == MODEL:
        write_model(model_folder(given), SHAPES[given.model], device_of(given))
        return 0
    if given.only is not None:
        train(given)
        return 0

    prepare(given, words)
    lines_of = {}
    failed = 0
    for schedule in given.schedules.split(","):
        started = time.perf_counter()
        lines_of[schedule], problem = run_schedule(given, schedule, words)
        seconds = time.perf_counter() - started
        steps = [f"{line['timing_s/step']:.1f}" for line in lines_of[schedule]]
        outcome = "done"
        if problem is not None:
            failed += 1
            outcome = f"FAILED: {problem}"
        print(f"{schedule}: {outcome}; {seconds:.0f} s, steps of {' '.join(steps)} s", flush=True)

    report(given, lines_of)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
