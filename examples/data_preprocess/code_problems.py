"""HumanEval and MBPP as train.parquet and test.parquet; their programs run in the sandbox
(docs/reference/rewards.md).

    python examples/data_preprocess/code_problems.py --dataset mbpp
    python examples/data_preprocess/code_problems.py --dataset humaneval --local_dataset_path raw

The raw file comes from the hub, or from a local folder with HumanEval.jsonl or mbpp.jsonl, plain
or gzipped. HumanEval has 164 problems, all of them for testing. MBPP's split is that of its paper:
test 11-510, training 601-974 and validation 511-600; the ten few-shot examples are left out. (The
file is not called code.py: Python would find it as its own `code`.)
"""

import argparse
import json
import sys
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from verl.data.files import load_from_hub, require_columns
from verl.data.json_rows import read_json_rows
from verl.data.raw_files import raw_folder, require_rows, require_texts, write_tables
from verl.utils.entry import exit_code

SOURCES = {"humaneval": "openai/openai_humaneval", "mbpp": "google-research-datasets/mbpp"}
FILES = {"humaneval": "HumanEval.jsonl", "mbpp": "mbpp.jsonl"}
TEXTS = {
    "humaneval": ("task_id", "prompt", "test", "entry_point", "canonical_solution"),
    "mbpp": ("text", "code", "test_setup_code"),
}
OTHERS = {"humaneval": (), "mbpp": ("task_id", "test_list")}
HUMANEVAL_INSTRUCTION = (
    "Complete this Python function. Answer with the whole function in one Python code block.\n\n"
)
MBPP_INSTRUCTION = (
    "{text}\n\nYour code must pass these tests:\n\n{tests}\n\nAnswer with one Python code block, "
    "without the tests."
)


def read_raw(folder: str | None, dataset: str) -> Iterable[dict[str, Any]]:
    """Return all problems, from a folder, or else from the hub.

    Ends the script if the folder has no such file.
    """
    if folder is None:
        splits: Any = load_from_hub(SOURCES[dataset])
        return (row for split in splits.values() for row in split)
    root = raw_folder(folder)
    for name in (FILES[dataset], f"{FILES[dataset]}.gz"):
        path = root / name
        if path.is_file():
            return read_json_rows(path)
    sys.exit(f"'{folder}' must hold {FILES[dataset]} or {FILES[dataset]}.gz, found neither.")


def make_humaneval_row(raw: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return split and row."""
    truth = {name: raw[name] for name in ("prompt", "test", "entry_point")}
    solution = raw["prompt"] + raw["canonical_solution"]
    index = int(raw["task_id"].split("/")[1])
    question = HUMANEVAL_INSTRUCTION + raw["prompt"]
    return "test", _row("humaneval", question, truth, solution, "test", index)


def make_mbpp_row(raw: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return split and row; None for a few-shot example."""
    number = int(raw["task_id"])
    if number <= 10:
        return None
    if number <= 510:
        split = "test"
    elif number <= 600:
        split = "val"
    else:
        split = "train"

    tests = list(raw["test_list"])
    truth = {"test_list": tests, "test_setup_code": raw["test_setup_code"]}
    question = MBPP_INSTRUCTION.format(text=raw["text"], tests="\n".join(tests))
    return split, _row("mbpp", question, truth, raw["code"], split, number)


def _row(
    dataset: str, question: str, truth: dict, solution: str, split: str, index: int
) -> dict[str, Any]:
    return {
        "data_source": SOURCES[dataset],
        "prompt": [{"role": "user", "content": question}],
        "ability": "code",
        # As JSON: columns of one type, whatever the form of the tests.
        "reward_model": {"style": "rule", "ground_truth": json.dumps(truth)},
        "extra_info": {"split": split, "index": index, "question": question, "solution": solution},
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", choices=sorted(SOURCES), required=True)
    parser.add_argument("--local_dataset_path", help="folder of the raw file; default: the hub")
    parser.add_argument(
        "--local_save_dir", "--local_dir", help="folder to write to; default: ~/data/<dataset>"
    )

    options = parser.parse_args(arguments)
    make = {"humaneval": make_humaneval_row, "mbpp": make_mbpp_row}[options.dataset]
    splits: dict[str, list[dict[str, Any]]] = {}

    for index, raw in enumerate(read_raw(options.local_dataset_path, options.dataset)):
        place = f"{options.dataset} row {index}"
        require_columns(raw, OTHERS[options.dataset], place)
        require_texts(raw, TEXTS[options.dataset], place)
        made = make(raw)
        if made is not None:
            split, row = made
            splits.setdefault(split, []).append(row)

    tables = {split: pa.Table.from_pylist(rows) for split, rows in splits.items()}
    require_rows(list(tables), options.dataset)
    folder = options.local_save_dir
    write_tables(f"~/data/{options.dataset}" if folder is None else folder, tables)


if __name__ == "__main__":
    sys.exit(exit_code(main))
