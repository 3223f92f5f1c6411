"""Asynchronous against synchronous training on CPU: two gloo ranks, episodes with tools that wait.

Every episode draws `--turns` turns of 8 tokens and waits `--tool-ms` for a tool after each; the
reward is the share of digits among the drawn text. All schedules get the same prompts, samples and
steps:

| schedule | ranks |
|---|---|
| together | synchronous, both ranks generate and learn |
| sync | synchronous, rank 1 generates, then rank 0 learns |
| ahead | trainer.mode=one_step_off, rank 1 generates the next batch while rank 0 learns |
| fully | trainer.mode=fully_async, rank 1 plays on while rank 0 learns, one batch ahead at most |

Run `python bench/async_cpu.py` on a machine that does nothing else. Seconds are medians over the
steps after the warm-up; rewards are means over the last quarter of the steps.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from digit_task import WARMUP_STEPS, write_prompts
from processes import require_python
from runs import read_metrics

HERE = Path(__file__).resolve()
SCHEDULES = {
    "together": [],
    "sync": ["trainer.placement.rollout=[1]"],
    "ahead": ["trainer.placement.rollout=[1]", "trainer.mode=one_step_off"],
    "fully": ["trainer.placement.rollout=[1]", "trainer.mode=fully_async"],
}
PEERS = ("together", "sync")
OURS = {"ahead": "one_step_off", "fully": "fully_async"}
TOKENS_OF_A_TURN = 8
LIMIT_S = 600.0  # of one run


def command(given: argparse.Namespace, schedule: str, seed: int, folder: Path) -> list[str]:
    """Return the arguments of main_ppo."""
    rollout = "actor_rollout_ref.rollout"
    return [
        f"data.train_files={folder.parent / 'prompts.jsonl'}",
        f"data.train_batch_size={given.prompts}",
        "data.max_prompt_length=64",
        f"data.max_response_length={(TOKENS_OF_A_TURN + 24) * given.turns}",
        f"actor_rollout_ref.model.path={given.model}",
        f"actor_rollout_ref.model.external_lib={HERE.parent / 'waiting_loop.py'}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"actor_rollout_ref.actor.optim.lr={given.lr}",
        f"actor_rollout_ref.actor.ppo_epochs={given.epochs}",
        f"{rollout}.n={given.samples}",
        f"{rollout}.mode=async",
        f"{rollout}.agent.default_agent_loop=waiting",
        f"{rollout}.agent.gives_reward=True",
        f"{rollout}.multi_turn.max_tokens_per_turn={TOKENS_OF_A_TURN}",
        f"{rollout}.ignore_eos=True",
        "algorithm.adv_estimator=grpo",
        f"algorithm.rollout_correction.preset={given.correction}",
        f"trainer.total_training_steps={given.steps}",
        f"trainer.seed={seed}",
        "trainer.device=cpu",
        "trainer.num_threads=1",
        f"trainer.default_local_dir={folder}",
        'trainer.logger=["file"]',
        *SCHEDULES[schedule],
    ]


def run(given: argparse.Namespace, schedule: str, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Train on two ranks, and return the metrics of the steps."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    keys = command(given, schedule, seed, folder)
    environment = {
        "BENCH_TURNS": str(given.turns),
        "BENCH_TOOL_S": str(given.tool_ms / 1000),
        "PYTHONPATH": f"{HERE.parents[1]}:{HERE.parent}",
    }
    require_python(
        [*launcher, "-m", "verl.trainer.main_ppo", *keys], environment=environment, limit_s=LIMIT_S
    )
    return read_metrics(folder)


def median_step(lines: list[dict], name: str = "step") -> float:
    """Return the median seconds of a phase after the warm-up."""
    return statistics.median(line[f"timing_s/{name}"] for line in lines[WARMUP_STEPS:])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="toy", help="a packaged name or a folder [toy]")
    parser.add_argument("--prompts", type=int, default=8, help="of a step [8]")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt [8]")
    parser.add_argument("--turns", type=int, default=6, help="of an episode [6]")
    parser.add_argument("--tool-ms", type=float, default=50.0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=1, help="of an update [1]")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument(
        "--correction", default="decoupled_token_is", help="preset of the correction, for all"
    )
    parser.add_argument("--seeds", default="1,2,3", help="by commas")
    parser.add_argument("--json", type=Path, help="file for the result")
    return parser.parse_args()


def main() -> None:
    given = parse_arguments()
    seconds: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    rewards: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    print("| seed | schedule | s a step | generation waited for | update | reward, first | last |")
    print("|---|---|---|---|---|---|---|")
    for seed in map(int, given.seeds.split(",")):
        with tempfile.TemporaryDirectory() as place:
            write_prompts(Path(place) / "prompts.jsonl", given.prompts * given.steps, seed)
            for schedule in SCHEDULES:
                lines = run(given, schedule, seed, Path(place) / schedule)
                scores = [line["critic/score/mean"] for line in lines]
                seconds[schedule].append(median_step(lines))
                rewards[schedule].append(statistics.mean(scores[-(len(scores) // 4) :]))
                print(
                    f"| {seed} | {schedule} | {seconds[schedule][-1]:.3f} | "
                    f"{median_step(lines, 'gen'):.3f} | {median_step(lines, 'update_actor'):.3f} | "
                    f"{scores[0]:.3f} | {rewards[schedule][-1]:.3f} |",
                    flush=True,
                )

    for ours, peer in itertools.product(OURS, PEERS):
        ratios = [one / other for one, other in zip(seconds[peer], seconds[ours])]
        print(
            f"{OURS[ours]} against {peer}: {statistics.median(ratios):.2f}x the throughput "
            f"({min(ratios):.2f} to {max(ratios):.2f}); reward "
            f"{statistics.mean(rewards[ours]):.3f} against {statistics.mean(rewards[peer]):.3f}"
        )
    if given.json:
        given.json.write_text(json.dumps({"seconds": seconds, "rewards": rewards}) + "\n")


if __name__ == "__main__":
    main()
