"""Write the prompts of the stories example: train.jsonl and val.jsonl.

Every prompt asks for a story about two things, `This is a story about a dog and a bird.`, and the
reward looks for both words. The pairs of the validation file occur in the training file in neither
order.

Run `python examples/stories/prepare.py --output FOLDER`.
"""

import argparse
import itertools
import json
import random
import sys
from pathlib import Path

from verl.utils.entry import exit_code

# Words that the model knows: all of them are common in the stories it was trained on.
THINGS = (
    "ball",
    "bear",
    "bird",
    "boat",
    "box",
    "boy",
    "cake",
    "car",
    "cat",
    "dog",
    "doll",
    "duck",
    "fish",
    "flower",
    "frog",
    "garden",
    "girl",
    "hat",
    "horse",
    "king",
    "rabbit",
    "star",
    "train",
    "tree",
)
NUM_VALIDATION = 32


def make_row(split: str, index: int, first: str, second: str) -> dict:
    """Return one prompt in the format of every data set.

    `reward.py` reads the two words from the ground truth.
    """
    return {
        "data_source": "stories",
        "prompt": [{"role": "user", "content": f"This is a story about a {first} and a {second}."}],
        "ability": "story",
        "reward_model": {"style": "rule", "ground_truth": [first, second]},
        "extra_info": {"split": split, "index": index},
    }


def make_splits(seed: int) -> dict[str, list[dict]]:
    """Return the rows of both splits.

    Validation has some pairs of things in one order, training all other pairs in both orders.
    """
    draw = random.Random(seed)
    pairs = list(itertools.combinations(THINGS, 2))
    draw.shuffle(pairs)
    held_out, others = pairs[:NUM_VALIDATION], pairs[NUM_VALIDATION:]
    training = []
    for one, other in others:
        training += [(one, other), (other, one)]
    draw.shuffle(training)
    return {
        "train": [make_row("train", index, *pair) for index, pair in enumerate(training)],
        "val": [make_row("val", index, *pair) for index, pair in enumerate(held_out)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for train.jsonl and val.jsonl"
    )
    parser.add_argument("--seed", type=int, default=0, help="which pairs are held out")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for split, rows in make_splits(arguments.seed).items():
        path = arguments.output / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    sys.exit(exit_code(main))
