"""One device, long tails: generation and update in time slices against the synchronous step.

A random model of Qwen2.5-1.5B's shape, prompts of 256 random tokens, responses of forced lengths
with a long tail, one optimizer step a batch. Every prompt has the same lengths under both schedules,
so both train on the same responses. The first steps are a warm-up and the last ones drain the
responses that were generated ahead; neither is counted.

    python bench/async_timeslice.py --prompts 64 --samples 16 --new-tokens 8192
    python bench/async_timeslice.py --tiny                    tries the script on CPU

Each schedule runs in a process of its own, with the time limit `--limit-s`.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# the package beside us, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_step import RandomPrompts, even_share, make_config, write_model
from rollout_models import SHAPES
from rollout_work import draw_limits
from training_process import run_limited

from verl.config.load import config_from_dict, config_to_dict
from verl.rollout import Request
from verl.trainer.variants import trainer_class

SCHEDULES = ("sync", "fully_async")
TINY = {"prompts": 4, "samples": 2, "prompt_tokens": 16, "new_tokens": 48, "micro_tokens": 200}
PHASES = ("gen", "reward", "old_log_prob", "adv", "update_actor", "sync_weights", "step")


def impose_lengths(engine: Any, given: argparse.Namespace) -> None:
    """Give every sample its length: a function of the batch of its prompt, its row and number."""
    submit = engine.submit
    rows = given.prompts * given.samples
    lengths: dict[int, Any] = {}

    def limit_of(step: int, number: int) -> int:
        if step not in lengths:
            lengths[step] = draw_limits(f"tail:{given.new_tokens}", rows, given.seed + step)
        return int(lengths[step][number])

    def limited(requests: list[Request], params: Any, *, seed: int, step: int) -> None:
        asked = []
        for request in requests:
            if request.continuations is None:
                limits = [limit_of(step, number) for number in request.sample_ids]
            else:
                limits = [limit_of(each.step, each.number) for each in request.continuations]
            asked.append(replace(request, limits=tuple(limits)))
        submit(asked, params, seed=seed, step=step)

    engine.submit = limited


def train(given: argparse.Namespace) -> None:
    """Train with one schedule; the metrics are in the folder of the run."""
    device = torch.device("cpu" if given.tiny else "cuda")
    folder = given.out / given.only
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "model"
    if not link.exists():
        link.symlink_to(given.out / "model", target_is_directory=True)

    given.steps = given.warm_up + given.counted + given.drained
    values = config_to_dict(make_config(given, folder, device))
    values["trainer"]["mode"] = given.only
    values["async_training"]["staleness_threshold"] = given.staleness
    if given.max_staleness is not None:
        values["async_training"]["max_staleness"] = given.max_staleness
    if given.keep_kv_cache:
        values["async_training"]["keep_kv_cache"] = True
        values["actor_rollout_ref"]["rollout"]["free_cache_engine"] = False
    values["actor_rollout_ref"]["rollout"]["max_num_seqs"] = given.max_num_seqs
    values["actor_rollout_ref"]["rollout"]["gpu_memory_utilization"] = given.memory
    # The same passes under both schedules: the ratio is against the rollout's log-probs.
    values["algorithm"]["rollout_correction"]["bypass_mode"] = True
    config = config_from_dict(values)

    trainer = trainer_class(config)(
        config,
        reward_fn=even_share,
        val_reward_fn=even_share,
        train_dataset=RandomPrompts(
            given.prompts * given.steps, given.prompt_tokens, SHAPES[given.model]["vocab_size"]
        ),
    )
    trainer.init_workers()
    group: Any = trainer.rollout_wg
    impose_lengths(group.worker.engine, given)
    trainer.fit()


def measured(given: argparse.Namespace, schedule: str) -> dict[str, Any]:
    """Return seconds and trained tokens of the counted steps."""
    file = given.out / schedule / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    counted = lines[given.warm_up : given.warm_up + given.counted]
    seconds = {}
    for phase in PHASES:
        seconds[phase] = sum(line.get(f"timing_s/{phase}", 0.0) for line in counted) / len(counted)
    return {
        "seconds": seconds,
        "steps": [line["timing_s/step"] for line in lines],
        "tokens": sum(line["perf/total_num_tokens"] for line in counted),
        "tokens_of_the_run": sum(line["perf/total_num_tokens"] for line in lines),
        "tokens_per_s": sum(line["perf/total_num_tokens"] for line in counted)
        / sum(line["timing_s/step"] for line in counted),
        "oldest": max(line.get("fully_async/age/max", 0.0) for line in lines),
        "discarded": max(line.get("fully_async/discarded_tokens", 0.0) for line in lines),
        "peak_gib": max(line.get("perf/max_memory_allocated_gb", 0.0) for line in lines),
    }


def parse_arguments() -> argparse.Namespace:
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
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="by commas")
    parser.add_argument("--limit-s", type=float, default=580.0, help="time limit of a schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on CPU")
    parser.add_argument("--out", type=Path, default=Path("outputs/timeslice"))
    parser.add_argument("--only", choices=SCHEDULES, help="run this schedule, in this process")
    given = parser.parse_args()
    if given.tiny:
        vars(given).update(TINY, model="tiny")
    given.out = given.out.resolve()
    return given


def prepare(given: argparse.Namespace) -> None:
    """Write the model, with as many positions as the longest response needs."""
    file = given.out / "model" / "config.json"
    if not file.is_file():
        device = torch.device("cpu" if given.tiny else "cuda")
        write_model(given.out / "model", SHAPES[given.model], device)
    config = json.loads(file.read_text(encoding="utf-8"))
    config["max_position_embeddings"] = given.prompt_tokens + given.new_tokens
    file.write_text(json.dumps(config), encoding="utf-8")


def main() -> None:
    given = parse_arguments()
    if given.only is not None:
        prepare(given)
        train(given)
        return

    results = {}
    for schedule in given.schedules.split(","):
        started = time.perf_counter()
        log = given.out / f"{schedule}.log"
        command = [str(Path(__file__).resolve()), "--only", schedule, *sys.argv[1:]]
        problem = run_limited(command, log, limit_s=given.limit_s)
        if problem:
            print(f"{schedule}: FAILED: {problem}", flush=True)
            continue
        results[schedule] = measured(given, schedule)
        print(
            f"{schedule}: {time.perf_counter() - started:.0f} s in all; {results[schedule]}",
            flush=True,
        )
        (given.out / "timeslice.json").write_text(json.dumps(results, indent=1), encoding="utf-8")

    if len(results) == len(SCHEDULES):
        sync = results["sync"]
        ours = results["fully_async"]
        print(f"\n| seconds a step | {' | '.join(results)} |\n|---|{'---|' * len(results)}")
        for phase in PHASES:
            cells = [f"{each['seconds'][phase]:.2f}" for each in results.values()]
            print(f"| {phase} | {' | '.join(cells)} |")
        print(
            f"fully_async trains {ours['tokens_per_s'] / sync['tokens_per_s']:.2f}x the tokens a "
            f"second; tokens of the run {ours['tokens_of_the_run']:,} and "
            f"{sync['tokens_of_the_run']:,}; oldest token {ours['oldest']:.0f} versions; "
            f"{ours['discarded']:.0f} discarded"
        )


if __name__ == "__main__":
    main()
