"""GSM8K as train.parquet (7,473 rows) and test.parquet (1,319 rows) for `data.train_files` and
`data.val_files`.

    python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k  # from the hub
    python examples/data_preprocess/gsm8k.py --local_dataset_path raw/gsm8k --local_save_dir ~/data/gsm8k

A local folder holds train.jsonl and test.jsonl, one {"question", "answer"} a line, the answer
ending in "#### number"; or it is a copy of the hub's folder (main/train-00000-of-00001.parquet).
"""

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.files import load_from_hub
from verl.data.json_rows import read_json_rows
from verl.data.raw_files import raw_folder, require_rows, require_texts, write_tables
from verl.rewards.builtin.gsm8k import extract_answer
from verl.utils.entry import exit_code
from verl.utils.errors import DataError

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SPLITS = ("train", "test")


def read_raw(folder: str | None, split: str) -> Iterable[dict[str, Any]]:
    """Return questions and answers of a split, from a folder, or else from the hub.

    Ends the script if the folder has none.
    """
    if folder is None:
        return load_from_hub(DATA_SOURCE, "main", split=split)
    path = raw_folder(folder) / f"{split}.jsonl"
    if path.is_file():
        return read_json_rows(path)
    copied = sorted(path.parent.glob(f"main/{split}-*.parquet"))
    if copied:
        return pq.read_table(copied).to_pylist()
    sys.exit(
        f"'{path.parent}' must hold {path.name}, or main/{split}-*.parquet as a copy of the hub's "
        f"folder has it, for the split {split}, found neither."
    )


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return one row as the trainer reads it.

    Raises DataError for one without question, or without an answer with its number.
    """
    require_texts(raw, ("question", "answer"), f"{split} row {index}")
    ground_truth = extract_answer(raw["answer"])
    if ground_truth is None:
        raise DataError(
            f"{split} row {index}: the answer must end in '#### number', got "
            f"{raw['answer'][-40:]!r}. Write the number behind it, or take the row out."
        )

    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{raw['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": raw["answer"],
            "question": raw["question"],
        },
    }


def write_splits(
    make_row: Callable[[dict[str, Any], str, int], dict[str, Any]],
    arguments: list[str] | None,
    *,
    description: str | None,
    folder: str,
) -> None:
    """Write a file of rows for each split, as the command line says.

    Args:
        make_row: called with a raw row, its split and its number.
        arguments: of the command line; None: those of the process.
        description: of the script.
        folder: to write to by default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--local_dataset_path",
        help="folder of train.jsonl and test.jsonl, or a copy of the hub's; default: the hub",
    )
    parser.add_argument(
        "--local_save_dir",
        "--local_dir",
        default=folder,
        help="folder to write to; default: %(default)s",
    )

    options = parser.parse_args(arguments)
    tables = {}
    for split in SPLITS:
        rows = []
        for index, raw in enumerate(read_raw(options.local_dataset_path, split)):
            rows.append(make_row(raw, split, index))
        require_rows(rows, split)
        tables[split] = pa.Table.from_pylist(rows)
    write_tables(options.local_save_dir, tables)


def main(arguments: list[str] | None = None) -> None:
    write_splits(make_row, arguments, description=__doc__, folder="~/data/gsm8k")


if __name__ == "__main__":
    sys.exit(exit_code(main))
