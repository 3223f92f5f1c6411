"""Does a model learn to use a tool? Supervised start from five demos, then GRPO, from three seeds.

    python bench/calculator.py [--seeds 1,2,3] [--steps 60]

The task is `data.dataset_name=calculator`: products of two three-digit numbers. Each seed trains
twice from the same supervised start: with the packaged calculator, and without tools. Success is
the share of right answers on 64 held-out questions, 4 samples each at temperature 1. Every run is a
program of its own on one thread. Exit code 1 if success with the tool rises by less than 0.3, if it
rises without, or if a run takes ten minutes.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from processes import require_python
from runs import as_hugging_face, validation_scores

from verl.data.toy import calculator_demos

GOAL = 0.3  # rise of the success with the tool
LARGEST_WITHOUT = 0.05  # success that counts as none
LONGEST_S = 600.0
SUCCESS = "val-core/calculator/reward/mean@4"
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
SUPERVISED = [
    "model.path=calculator",
    "model.enable_gradient_checkpointing=False",
    f"data.train_files={calculator_demos()}",
    "data.multiturn.enable=True",
    "data.train_batch_size=5",
    "data.max_length=128",
    "optim.lr=2e-3",
    "trainer.total_epochs=70",
    "trainer.save_freq=70",
    "trainer.num_threads=1",
]
REINFORCED = [
    "data.dataset_name=calculator",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.actor.optim.lr=5e-4",
]
VARIANTS = {
    "calculator": [],  # the defaults of the data set offer it
    "no tools": [
        f"{MULTI_TURN}.enable=False",
        f"{MULTI_TURN}.function_tool_path=null",
        f"{MULTI_TURN}.max_assistant_turns=null",
    ],
}


def supervised_start(folder: Path, seed: int) -> Path:
    """Fine-tune on the demos and return a folder in Hugging Face format."""
    where = [f"trainer.default_local_dir={folder}", 'trainer.logger=["file"]']
    seeds = [f"data.seed={seed}", f"trainer.seed={seed}"]
    require_python(["-m", "verl.jobs.main_sft", *SUPERVISED, *where, *seeds])
    (checkpoint,) = folder.glob("global_step_*")
    return as_hugging_face(checkpoint, folder / "model")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="1,2,3", help="by commas")
    parser.add_argument("--steps", type=int, default=60, help="of GRPO")
    given = parser.parse_args()

    print("| seed | tools | after the demos | after GRPO | seconds |")
    print("|---|---|---|---|---|")
    reached = True
    for seed in [int(seed) for seed in given.seeds.split(",")]:
        with tempfile.TemporaryDirectory() as place:
            begin = time.monotonic()
            start = supervised_start(Path(place) / "sft", seed)
            start_s = time.monotonic() - begin

            for variant in VARIANTS:
                begin = time.monotonic()
                folder = Path(place) / variant.replace(" ", "_")
                keys = [*REINFORCED, *VARIANTS[variant]]
                scores = validation_scores(
                    keys, folder, SUCCESS, model=start, seed=seed, steps=given.steps
                )
                seconds = start_s + time.monotonic() - begin
                before, after = scores[0], scores[-1]
                print(
                    f"| {seed} | {variant} | {before:.3f} | {after:.3f} | {seconds:.0f} |",
                    flush=True,
                )
                if variant == "no tools":
                    reached &= after <= LARGEST_WITHOUT
                else:
                    reached &= after - before >= GOAL
                reached &= seconds < LONGEST_S

    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
