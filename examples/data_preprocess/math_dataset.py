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
from typing import Any

import pyarrow as pa

from verl.data.files import load_from_hub
from verl.data.json_rows import read_json_rows
from verl.data.raw_files import raw_folder, require_texts, write_tables
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
    """Return the problems of a split, from a folder, or else from the hub.

    Ends the script if the folder has none.
    """
    if folder is None:
        return load_from_hub(HUB_NAME, split=split)
    root = raw_folder(folder)
    for name in FILES[split]:
        if (root / name).is_file():
            return read_json_rows(root / name)
    sys.exit(
        f"'{root}' must hold one of {', '.join(FILES[split])} for the split {split}, found none."
    )


def final_answer(raw: dict[str, Any]) -> str | None:
    """Return the answer, or the last \\boxed{} of the solution; None where there is neither."""
    given = raw.get("answer")
    if given in (None, ""):
        solution = raw.get("solution")
        return last_boxed(solution) if isinstance(solution, str) else None
    return str(given)


def make_row(raw: dict[str, Any], answer: str, split: str, index: int) -> dict[str, Any]:
    """Return one row as the trainer reads it. Raises DataError for one without a problem."""
    require_texts(raw, ("problem",), f"{split} row {index}")
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
    """Return the rows of a split.

    Problems without an answer cannot be scored; they are left out, and their numbers printed.
    """
    rows = []
    without = []
    for index, raw in enumerate(raw_rows):
        answer = final_answer(raw)
        if answer is None:
            without.append(index)
        else:
            rows.append(make_row(raw, answer, split, index))

    count = len(rows) + len(without)
    if without:
        print(
            f"left out {len(without)} of {count:,} {split} problems that have no answer: "
            f"rows {without}"
        )
    if not rows:
        raise DataError(
            f"The split {split} has no problem with an answer, got {count:,} rows without. "
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

    tables = {}
    for split in FILES:
        rows = make_rows(read_raw(options.local_dataset_path, split), split)
        tables[split] = pa.Table.from_pylist(rows)
    write_tables(options.local_save_dir, tables)


if __name__ == "__main__":
    sys.exit(exit_code(main))
