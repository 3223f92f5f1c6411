"""HH-RLHF preference pairs (Bai et al. 2022, arXiv:2204.05862) as prompts: the conversation up to
the last answer.

    python examples/data_preprocess/hh_rlhf.py --local_save_dir ~/data/hh_rlhf  # from the hub
    python examples/data_preprocess/hh_rlhf.py --local_dataset_path raw/hh-rlhf

A local folder holds files of {"chosen", "rejected"} a line, plain or gzipped, with "train" or
"test" in their names. `ground_truth` is the chosen last answer, for reward models and judges that
want a reference; the rejected one stands in `extra_info`. No rule scores these rows: name a reward
model, a judge or a function of your own.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from verl.data.files import load_from_hub
from verl.data.json_rows import read_json_rows
from verl.data.raw_files import raw_folder, require_texts, write_tables
from verl.utils.entry import exit_code
from verl.utils.errors import DataError

DATA_SOURCE = "Anthropic/hh-rlhf"
SPLITS = ("train", "test")
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def read_raw(folder: str | None, split: str) -> Iterable[dict[str, Any]]:
    """Return the pairs of a split, from a folder, or else from the hub.

    There are none where the folder has no file of that split.
    """
    if folder is None:
        return load_from_hub(DATA_SOURCE, split=split)
    files = sorted(raw_folder(folder).glob(f"*{split}*.jsonl*"))
    return [row for file in files for row in read_json_rows(file)]


def split_turns(text: str) -> list[dict[str, str]]:
    """Split a transcript into messages. Turns of one speaker that follow each other become one."""
    parts = _TURN.split(text)[1:]
    messages: list[dict[str, str]] = []
    for speaker, content in zip(parts[::2], parts[1::2]):
        if messages and messages[-1]["role"] == _ROLES[speaker]:
            messages[-1]["content"] += f"\n\n{content.strip()}"
        else:
            messages.append({"role": _ROLES[speaker], "content": content.strip()})
    return messages


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any] | None:
    """Return one row as the trainer reads it.

    None for a pair that does not differ in a last answer to the same prompt. Raises DataError for
    one that lacks a column, or has no text in it.
    """
    require_texts(raw, ("chosen", "rejected"), f"{split} row {index}")
    chosen = split_turns(raw["chosen"])
    rejected = split_turns(raw["rejected"])

    is_dialogue = (
        len(chosen) >= 2
        and chosen[0]["role"] == "user"
        and chosen[-1]["role"] == "assistant"
        and all(message["content"] for message in chosen)
    )
    if not is_dialogue or chosen[:-1] != rejected[:-1]:
        return None

    return {
        "data_source": DATA_SOURCE,
        "prompt": chosen[:-1],
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": chosen[-1]["content"]},
        "extra_info": {
            "split": split,
            "index": index,
            "question": chosen[-2]["content"],
            "answer": chosen[-1]["content"],
            "rejected": rejected[-1]["content"],
        },
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local_dataset_path", help="folder of the raw files; default: the hub")
    parser.add_argument(
        "--local_save_dir",
        "--local_dir",
        default="~/data/hh_rlhf",
        help="folder to write to; default: %(default)s",
    )
    options = parser.parse_args(arguments)

    tables = {}
    for split in SPLITS:
        rows = []
        num_left_out = 0
        for index, raw in enumerate(read_raw(options.local_dataset_path, split)):
            row = make_row(raw, split, index)
            if row is None:
                num_left_out += 1
            else:
                rows.append(row)
        if num_left_out and not rows:
            raise DataError(
                f"No pair of {split} has a dialogue that starts with '\\n\\nHuman:' and a last "
                f"answer of the assistant to the same prompt, got {num_left_out} pairs. Correct "
                "the transcripts, or take the file out."
            )
        if rows:
            tables[split] = pa.Table.from_pylist(rows)
            print(f"left out {num_left_out} pairs of {split} that do not pair")

    if not tables:
        parser.error(
            f"no pairs in '{options.local_dataset_path}': expected files such as train.jsonl or "
            "test.jsonl.gz"
        )
    write_tables(options.local_save_dir, tables)


if __name__ == "__main__":
    sys.exit(exit_code(main))
