"""Do runs learn the same on a vLLM server as on the embedded engine? GRPO on stories, three seeds.

    python bench/engines_learn.py MODEL --server-python VENV/bin/python [--seeds 1,2,3] [--steps 40]

Runs `examples/stories/run.sh` with each engine, every hand-over of weights proved. MODEL is the
folder of stories260K with heads that vLLM can compute (`widen_heads.py`). Exit code 1 if a log-prob of the
server differs from the trainer's by more than 1e-6 in the mean of a step, or if the mean rewards of
the last quarter differ by more than three standard errors of the seeds.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from runs import read_metrics

SCRIPT = Path(__file__).resolve().parents[1] / "examples/stories/run.sh"
LARGEST_KL = 1e-6
ROLLOUT = "actor_rollout_ref.rollout"


def steps_of(given: argparse.Namespace, engine: str, seed: str, folder: Path) -> list[dict]:
    """Train once, and return the metrics of the steps."""
    keys = [
        f"trainer.max_steps={given.steps}",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        f"{ROLLOUT}.fingerprint_interval=1",
    ]
    if engine == "vllm":
        keys += [
            f"{ROLLOUT}.name=vllm",
            f"{ROLLOUT}.server_python={given.server_python}",
            f"{ROLLOUT}.enforce_eager=True",
        ]
    environment = {**os.environ, "PYTHON": sys.executable, "KEYS": " ".join(keys)}
    # The report at its end expects validations, which these runs do without.
    done = subprocess.run(
        [str(SCRIPT), str(given.model), str(folder), seed],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    run = folder / f"seed_{seed}"
    lines = []
    if (run / "metrics.jsonl").is_file():
        lines = read_metrics(run)
    steps = [line for line in lines if "critic/score/mean" in line]
    if len(steps) != given.steps:
        raise SystemExit(
            f"engines_learn.py: {engine}, seed {seed}: {len(steps)} of {given.steps} steps:\n"
            f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return steps


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--server-python", type=Path, required=True, help="of vLLM's environment")
    parser.add_argument("--seeds", default="1,2,3", help="by commas, at least two [1,2,3]")
    parser.add_argument("--steps", type=int, default=40, help="at least 4 [40]")

    given = parser.parse_args(words)
    given.seeds = given.seeds.split(",")
    if len(given.seeds) < 2:
        parser.error(f"--seeds must name at least two, to compare them, got {given.seeds}.")
    if given.steps < 4:
        parser.error(f"--steps must be at least 4, one for each quarter, got {given.steps}.")
    return given


def quarters(rewards: Sequence[float]) -> list[float]:
    """Return the mean of each quarter of the rewards."""
    size = len(rewards) // 4
    return [statistics.mean(rewards[start : start + size]) for start in range(0, 4 * size, size)]


def main() -> int:
    given = parse_arguments()
    lasts: dict[str, list[float]] = {"embedded": [], "vllm": []}
    largest_kl = 0.0
    print("| engine | seed | reward by quarters | largest rollout_kl | s a step |")
    print("|---|---|---|---|---|")
    for engine, rewards_of_seeds in lasts.items():
        for seed in given.seeds:
            with tempfile.TemporaryDirectory() as folder:
                steps = steps_of(given, engine, seed, Path(folder))

            means = quarters([step["critic/score/mean"] for step in steps])
            kl = max(abs(step["training/rollout_kl"]) for step in steps)
            seconds = statistics.median(step["timing_s/step"] for step in steps)
            curve = ", ".join(f"{value:.3f}" for value in means)
            print(f"| {engine} | {seed} | {curve} | {kl:.1e} | {seconds:.2f} |", flush=True)
            rewards_of_seeds.append(means[-1])
            largest_kl = max(largest_kl, kl)

    ours = lasts["embedded"]
    theirs = lasts["vllm"]
    spread = math.sqrt((statistics.variance(ours) + statistics.variance(theirs)) / len(ours))
    apart = abs(statistics.mean(ours) - statistics.mean(theirs))
    print(f"last quarter: {apart:.3f} apart, standard error {spread:.3f}")
    return 0 if largest_kl < LARGEST_KL and apart <= 3 * spread else 1


if __name__ == "__main__":
    sys.exit(main())
