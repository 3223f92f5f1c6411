"""Check folders and rows that a script of examples/data_preprocess reads, and write its files."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.files import require_columns
from verl.utils.errors import DataError


def raw_folder(folder: str) -> Path:
    """Return the folder of raw files that `--local_dataset_path` names.

    Raises DataError if there is no such folder, or if the text is empty.
    """
    _require_path("--local_dataset_path", folder, "Give the folder, or leave the option out")
    path = Path(folder).expanduser()
    if path.is_dir():
        return path
    fact = "is a file" if path.exists() else "does not exist"
    raise DataError(
        f"--local_dataset_path must be the folder of the raw files, but '{path}' {fact}. Correct "
        "the path, or leave the option out to load from the hub."
    )


def require_texts(row: Mapping[str, Any], names: Iterable[str], place: str) -> None:
    """Raise DataError if a raw row lacks one of the columns `names`, or has no text there.

    Args:
        row: as it was read.
        names: of the columns.
        place: of the row, for the message.
    """
    names = list(names)
    require_columns(row, names, place)
    for name in names:
        if not isinstance(row[name], str):
            raise DataError(
                f"{place}: the column '{name}' must be a text, got {row[name]!r:.80}. Write the "
                "text, or take the row out."
            )


def require_rows(rows: Sequence[Any], name: str) -> None:
    """Raise DataError if `name`, a split or a data set, has no row.

    A file of no rows has no columns, and the trainer would refuse it later.
    """
    if not rows:
        raise DataError(
            f"'{name}' has no row to write, expected at least one. Get its raw file again, or fill "
            "it."
        )


def write_tables(folder: str, tables: Mapping[str, pa.Table]) -> None:
    """Write a Parquet file for each split, and print its name and rows.

    The folder is made here, so that bad input leaves none behind. Raises DataError if its name is
    empty or belongs to a file.
    """
    _require_path("--local_save_dir", folder, "Give a folder; '.' is the current one")
    target = Path(folder).expanduser()
    if target.exists() and not target.is_dir():
        raise DataError(
            f"--local_save_dir must be a folder to write to, but '{target}' is a file. Name another "
            "folder, or move the file."
        )

    target.mkdir(parents=True, exist_ok=True)
    for split, table in tables.items():
        file = target / f"{split}.parquet"
        pq.write_table(table, file)
        print(f"wrote {len(table):,} rows to {file}")


def _require_path(option: str, path: str, way_out: str) -> None:
    if not path.strip():
        raise DataError(
            f"{option} has an empty path, as an unset variable of the shell leaves it. {way_out}."
        )
