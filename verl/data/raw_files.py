"""Folders that a script of examples/data_preprocess reads raw files from, and writes to."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.errors import DataError


def raw_folder(folder: str) -> Path:
    """Return the folder of raw files that `--local_dataset_path` names.

    Raises DataError if there is no such folder.
    """
    path = Path(folder).expanduser()
    if path.is_dir():
        return path
    fact = "is a file" if path.exists() else "does not exist"
    raise DataError(
        f"--local_dataset_path must be the folder of the raw files, but '{path}' {fact}. Correct "
        "the path, or leave the option out to load from the hub."
    )


def write_tables(folder: str, tables: Mapping[str, pa.Table]) -> None:
    """Write a Parquet file for each split, and print its name and rows.

    The folder is made here, so that bad input leaves none behind.
    """
    target = Path(folder).expanduser()
    target.mkdir(parents=True, exist_ok=True)
    for split, table in tables.items():
        file = target / f"{split}.parquet"
        pq.write_table(table, file)
        print(f"wrote {len(table):,} rows to {file}")
