"""Geometry3K as train.parquet and test.parquet, with its pictures in the rows.

    python examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k  # from the hub
    python examples/data_preprocess/geo3k.py --local_dataset_path raw/geo3k

A local folder holds train.jsonl and test.jsonl of {"images": [paths in the folder], "problem",
"answer"}, or the same as train.parquet and test.parquet with images as {"bytes", "path"}. A
problem has `<image>` where its picture belongs. Answers are scored as those of MATH.
"""

import argparse
import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from verl.data.files import load_from_hub, open_rows, require_columns
from verl.data.raw_files import raw_folder, require_texts, write_tables
from verl.data.rgb import open_picture
from verl.utils.entry import exit_code
from verl.utils.errors import DataError, describe_error

DATA_SOURCE = "hiyouga/geometry3k"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
SPLITS = ("train", "test")
IMAGES = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def read_raw(folder: str | None, split: str) -> tuple[str, Iterable[dict[str, Any]]]:
    """Return the problems of a split and the name of their file, from a folder, or else from the
    hub."""
    if folder is None:
        return f"{DATA_SOURCE} ({split})", load_from_hub(DATA_SOURCE, split=split)
    root = raw_folder(folder)
    for suffix in ("parquet", "jsonl"):
        file = root / f"{split}.{suffix}"
        if file.is_file():
            rows = open_rows(file)
            return str(file), (rows.row(number) for number in range(len(rows)))
    sys.exit(f"'{root}' must hold {split}.parquet or {split}.jsonl, found neither.")


def image_of(raw: Any, folder: str | None) -> dict[str, Any]:
    """Return an image as Parquet holds it: its bytes, and its name."""
    if isinstance(raw, dict):
        if raw.get("bytes") is not None:
            return {"bytes": raw["bytes"], "path": raw.get("path")}
        raw = raw["path"]
    if isinstance(raw, str):
        path = Path(folder or ".").expanduser() / raw
        return {"bytes": path.read_bytes(), "path": raw}
    stream = io.BytesIO()  # an image of PIL, from the hub
    raw.save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": None}


def make_row(
    raw: dict[str, Any], split: str, index: int, folder: str | None, file: str
) -> dict[str, Any]:
    """Return one row as the trainer reads it.

    Raises DataError for one without a problem, an answer or a picture that can be read.
    """
    place = f"{file}, row {index}"
    require_columns(raw, ("problem", "images", "answer"), place)
    require_texts(raw, ("problem", "answer"), place)

    given = raw["images"]
    if not isinstance(given, list) or not given:
        raise DataError(
            f"{place}: the column 'images' must be a list of at least one picture, got "
            f"{given!r:.80}. Write it, or take the row out."
        )
    try:
        images = [image_of(image, folder) for image in given]
        for image in images:
            open_picture(image["bytes"])
    except DataError as error:
        raise DataError(f"{place}: a picture cannot be read: {error}.") from error
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{place}: a picture cannot be read ({describe_error(error)}). Correct its "
            "path, or take the row out."
        ) from error

    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{raw['problem']} {INSTRUCTION}"}],
        "images": images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": raw["answer"]},
        "extra_info": {
            "split": split,
            "index": index,
            "question": raw["problem"],
            "answer": raw["answer"],
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
        default="~/data/geo3k",
        help="folder to write to; default: %(default)s",
    )
    options = parser.parse_args(arguments)

    folder = options.local_dataset_path
    tables = {}
    for split in SPLITS:
        rows = []
        file, raws = read_raw(folder, split)
        for index, raw in enumerate(raws):
            rows.append(make_row(raw, split, index, folder, file))
        table = pa.Table.from_pylist(rows)
        place = table.schema.get_field_index("images")
        images = pa.array([row["images"] for row in rows], type=IMAGES)
        tables[split] = table.set_column(place, "images", images)
    write_tables(options.local_save_dir, tables)


if __name__ == "__main__":
    sys.exit(exit_code(main))
