"""Does a model learn from pictures? Supervised start from demos, then GRPO, from three seeds.

    python bench/shapes.py [--seeds 1,2,3] [--steps 100]

The task is `data.dataset_name=shapes`: counting shapes in pictures of 24 x 24 pixels. Each seed
draws the weights of a tiny Qwen2.5-VL, fine-tunes them on demos until it answers about half of the
questions, and trains them with GRPO. Success is the share of right answers on 128 held-out
questions, 4 samples each at temperature 1. Every run is a program of its own on one thread. Exit
code 1 if success rises by less than 0.2 in some seed, or if a seed takes ten minutes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from verl.data.shapes import shapes_file
from verl.models.shapes_model import save_shapes_model

GOAL = 0.2  # rise of the success by GRPO
LONGEST_S = 600.0
BETWEEN = 8  # supervised steps between checkpoints
HALFWAY = 0.46  # loss of the two tokens of an answer; a model that guesses has 0.54
SUCCESS = "val-core/shapes/reward/mean@4"
SUPERVISED = [
    "model.enable_gradient_checkpointing=False",
    "data.prompt_key=prompt",
    "data.train_batch_size=32",
    "data.max_length=64",
    "optim.lr=1e-3",
    "optim.lr_warmup_steps=50",
    "optim.warmup_style=constant",
    "trainer.num_threads=1",
    'trainer.logger=["file"]',
]
REINFORCED = [
    "data.dataset_name=shapes",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.actor.optim.lr=5e-4",
    "trainer.val_before_train=True",
    "trainer.num_threads=1",
    'trainer.logger=["file"]',
]


def run(*arguments: str) -> None:
    """Run a Python program. Raises RuntimeError with its output if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr}")


def supervised_start(folder: Path, seed: int, epochs: int) -> Path:
    """Draw a model, fine-tune it on the demos, and return a folder in Hugging Face format."""
    untrained = folder / "untrained"
    save_shapes_model(untrained, seed)
    arguments = [
        *SUPERVISED,
        f"model.path={untrained}",
        f"data.train_files={shapes_file('demos')}",
        f"trainer.total_epochs={epochs}",
        f"trainer.save_freq={BETWEEN}",
        f"data.seed={seed}",
        f"trainer.seed={seed}",
        f"trainer.default_local_dir={folder / 'sft'}",
    ]
    run("-m", "verl.jobs.main_sft", *arguments)
    step = halfway(folder / "sft" / "metrics.jsonl")
    target = folder / "model"
    local = folder / "sft" / f"global_step_{step}" / "actor"
    places = ["--local_dir", str(local), "--target_dir", str(target)]
    run("-m", "verl.jobs.main_merge", "merge", "--backend", "fsdp", *places)
    return target


def halfway(metrics: Path) -> int:
    """Return the first saved step whose latest losses show that counting has begun to be learnt.

    A model first learns to answer with a number, and guesses it by how full a picture is. Then,
    within about thirty steps that differ from seed to seed, it learns to compare colors.
    """
    losses: list[float] = []
    for line in metrics.read_text().splitlines():
        values = json.loads(line)
        if "train/loss" in values:
            losses.append(values["train/loss"])
        latest = losses[-BETWEEN:]
        if len(losses) % BETWEEN == 0 and losses and sum(latest) / len(latest) < HALFWAY:
            return len(losses)
    raise RuntimeError(f"The loss of {len(losses)} steps has not come below {HALFWAY}.")


def success(folder: Path, model: Path, seed: int, steps: int) -> list[float]:
    """Train with GRPO and return the success of every validation, the first before any update."""
    arguments = [
        *REINFORCED,
        f"actor_rollout_ref.model.path={model}",
        f"trainer.max_steps={steps}",
        f"trainer.test_freq={steps}",
        f"trainer.seed={seed}",
        f"data.seed={seed}",
        f"trainer.default_local_dir={folder}",
    ]
    run("-m", "verl.trainer.main_ppo", *arguments)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[SUCCESS] for line in lines if SUCCESS in line]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1,2,3", help="by commas")
    parser.add_argument("--epochs", type=int, default=8, help="most of supervised training")
    parser.add_argument("--steps", type=int, default=100, help="of GRPO")
    given = parser.parse_args()

    print("| seed | after the demos | after GRPO | seconds |")
    print("|---|---|---|---|")
    reached = True
    for seed in [int(seed) for seed in given.seeds.split(",")]:
        with tempfile.TemporaryDirectory() as place:
            begin = time.monotonic()
            start = supervised_start(Path(place), seed, given.epochs)
            scores = success(Path(place) / "grpo", start, seed, given.steps)
            seconds = time.monotonic() - begin
            before, after = scores[0], scores[-1]
            print(f"| {seed} | {before:.3f} | {after:.3f} | {seconds:.0f} |", flush=True)
            reached = reached and after - before >= GOAL and seconds < LONGEST_S

    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
