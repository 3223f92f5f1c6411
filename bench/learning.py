"""Do the algorithms learn? Mean rewards of the first and last steps on the toy task, three seeds.

    python bench/learning.py [--only grpo,ppo] [--seeds 1,2,3]

Every run is `main_ppo` in a process of its own on one thread. The table lists the keys that differ
from the toy defaults. Rewards are means over three steps. Exit code 1 if one ends below 0.8.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from processes import require_python
from runs import read_metrics

GOAL = 0.8
COMMON = [
    "data.dataset_name=toy",
    "data.train_batch_size=8",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "actor_rollout_ref.actor.use_kl_loss=False",
]
ACTOR = "actor_rollout_ref.actor"
ALGORITHMS = {
    "GRPO": ["algorithm.adv_estimator=grpo", "trainer.max_steps=20"],
    "RLOO": ["algorithm.adv_estimator=rloo", "trainer.max_steps=20"],
    "REINFORCE++": ["algorithm.adv_estimator=reinforce_plus_plus", "trainer.max_steps=30"],
    "GSPO": [
        "algorithm.adv_estimator=grpo",
        f"{ACTOR}.policy_loss.loss_mode=gspo",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        f"{ACTOR}.clip_ratio_low=3e-4",
        f"{ACTOR}.clip_ratio_high=4e-4",
        "trainer.max_steps=20",
    ],
    "PPO": ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "trainer.max_steps=30"],
}


def rewards_of(overrides: list[str], seed: int) -> list[float]:
    """Train once, and return the mean score of every step."""
    with tempfile.TemporaryDirectory() as folder:
        where = [
            f"trainer.default_local_dir={folder}",
            'trainer.logger=["file"]',
            f"trainer.seed={seed}",
        ]
        require_python(["-m", "verl.trainer.main_ppo", *COMMON, *overrides, *where])
        lines = read_metrics(Path(folder))

    return [line["critic/score/mean"] for line in lines if line["step"] > 0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(ALGORITHMS), help="algorithms, by commas")
    parser.add_argument("--seeds", default="1,2,3")
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    chosen = [name for name in ALGORITHMS if name.lower() in given.only.lower().split(",")]

    columns = " | ".join(f"seed {seed}" for seed in seeds)
    print(f"| algorithm | steps | {columns} | keys |")
    print("|" + "---|" * (len(seeds) + 3))
    reached = True

    for name in chosen:
        cells = []
        steps = 0
        for seed in seeds:
            rewards = rewards_of(ALGORITHMS[name], seed)
            first = sum(rewards[:3]) / 3
            last = sum(rewards[-3:]) / 3
            steps = len(rewards)
            cells.append(f"{first:.3f} -> {last:.3f}")
            reached &= last >= GOAL
        settings = ", ".join(
            f"`{override}`" for override in ALGORITHMS[name] if "max_steps" not in override
        )
        print(f"| {name} | {steps} | {' | '.join(cells)} | {settings} |", flush=True)

    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
