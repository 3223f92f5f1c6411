"""MATH as train.parquet and test.parquet for `data.train_files` and `data.val_files`.

    python examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math  # from the hub
    python examples/data_preprocess/math_dataset.py --local_dataset_path raw/math

A local folder holds train.json (or train.jsonl) and test.jsonl (or math500.jsonl) of {"problem",
"answer"}, or with a "solution" whose last \\boxed{} is the answer. (The file is not called math.py:
Python would find it as its own `math`.)
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.files import load_from_hub, require_columns
from verl.data.json_rows import read_json_rows
from verl.rewards.builtin.math import last_boxed
from verl.utils.entry import exit_code
from verl.utils.errors import DataError

DATA_SOURCE = "lighteval/MATH"
HUB_NAME = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
FILES = {
    "train": ("train.json", "train.jsonl"),
    "test": ("test.json", "test.jsonl", "math500.jsonl"),
}


def read_raw(folder: str | None, split: str) -> Iterable[dict[str, Any]]:
    """Problems of a split, from a folder, or else from the hub. Ends the script if the folder has
    none."""
    if folder is None:
        return load_from_hub(HUB_NAME, split=split)
    root = Path(folder).expanduser()
    for name in FILES[split]:
        if (root / name).is_file():
            return read_json_rows(root / name)
    sys.exit(
        f"'{root}' must hold one of {', '.join(FILES[split])} for the split {split}, found none."
    )


def final_answer(raw: dict[str, Any]) -> str | None:
    """The answer as given, or what the solution boxes last; None where there is neither."""
    given = raw.get("answer")
    return last_boxed(raw.get("solution") or "") if given in (None, "") else str(given)


def make_row(raw: dict[str, Any], answer: str, split: str, index: int) -> dict[str, Any]:
    """One row as the trainer reads it. DataError for one without a problem."""
    require_columns(raw, ("problem",), f"{split} row {index}")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{raw['problem']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "split": split,
            "index": index,
            "question": raw["problem"],
            "answer": answer,
            "subject": raw.get("subject") or raw.get("type"),
        },
    }


def make_rows(raw_rows: Iterable[dict[str, Any]], split: str) -> list[dict[str, Any]]:
    """Rows of a split. Problems without an answer cannot be scored; they are left out, and
    named."""
    answers = [(index, raw, final_answer(raw)) for index, raw in enumerate(raw_rows)]
    without = [index for index, _, answer in answers if answer is None]
    if without:
        print(
            f"left out {len(without)} of {len(answers):,} {split} problems that have no answer: "
            f"rows {without}"
        )

    rows = [
        make_row(raw, answer, split, index) for index, raw, answer in answers if answer is not None
    ]
    if not rows:
        raise DataError(
            f"The split {split} has no problem with an answer, got {len(answers):,} rows without. "
            "Each needs an 'answer', or a 'solution' with \\boxed{}."
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local_dataset_path", help="folder of the raw files; default: the hub")
    parser.add_argument(
        "--local_save_dir",
        "--local_dir",
        default="~/data/math",
        help="folder to write to; default: %(default)s",
    )
    options = parser.parse_args(arguments)
    target = Path(options.local_save_dir).expanduser()
    target.mkdir(parents=True, exist_ok=True)
    for split in FILES:
        rows = make_rows(read_raw(options.local_dataset_path, split), split)
        pq.write_table(pa.Table.from_pylist(rows), target / f"{split}.parquet")
        print(f"wrote {len(rows):,} rows to {target / split}.parquet")


if __name__ == "__main__":
    sys.exit(exit_code(main))
