"""Does a model learn from pictures? Supervised start from demos, then GRPO, from three seeds.

    python bench/shapes.py [--seeds 1,2,3] [--steps 100]

The task is `data.dataset_name=shapes`: counting shapes in pictures of 24 x 24 pixels. Each seed
draws the weights of a tiny Qwen2.5-VL, fine-tunes them on demos until it answers about half of the
questions, and trains them with GRPO. Success is the share of right answers on 128 held-out
questions, 4 samples each at temperature 1. Every run is a program of its own on one thread. Exit
code 1 if success rises by less than 0.2 in some seed, or if a seed takes ten minutes.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from processes import require_python
from runs import as_hugging_face, read_metrics, validation_scores

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
]


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
    require_python(["-m", "verl.jobs.main_sft", *arguments])
    step = halfway(folder / "sft")
    return as_hugging_face(folder / "sft" / f"global_step_{step}", folder / "model")


def halfway(folder: Path) -> int:
    """Return the first saved step whose latest losses show that counting has begun to be learnt.

    A model first learns to answer with a number, and guesses it by how full a picture is. Then,
    within about thirty steps that differ from seed to seed, it learns to compare colors.
    """
    losses: list[float] = []
    for values in read_metrics(folder):
        if "train/loss" in values:
            losses.append(values["train/loss"])
        latest = losses[-BETWEEN:]
        if len(losses) % BETWEEN == 0 and losses and sum(latest) / len(latest) < HALFWAY:
            return len(losses)
    raise SystemExit(f"shapes.py: the loss of {len(losses)} steps has not come below {HALFWAY}.")


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
            folder = Path(place)
            start = supervised_start(folder, seed, given.epochs)
            scores = validation_scores(
                REINFORCED, folder / "grpo", SUCCESS, model=start, seed=seed, steps=given.steps
            )
            seconds = time.monotonic() - begin
            before, after = scores[0], scores[-1]
            print(f"| {seed} | {before:.3f} | {after:.3f} | {seconds:.0f} |", flush=True)
            reached = reached and after - before >= GOAL and seconds < LONGEST_S

    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
