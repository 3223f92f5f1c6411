"""Read data files: Parquet, JSON lines, JSON arrays, and folders written by `save_to_disk`.

In every format, a row consists of plain Python dicts, lists and scalars.
"""

import glob
import hashlib
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from verl.data.json_rows import read_json_rows
from verl.utils.errors import DataError, describe_error, shortage_while_reading
from verl.utils.json_text import parse_json
from verl.utils.lfs import describe_pointers

FORMATS = (
    "Parquet (.parquet), JSON lines (.jsonl, .json) or a folder written by datasets' save_to_disk"
)
# Names of each split in a `save_to_disk` folder with several splits; the first one found is used.
SPLITS = {"train": ("train",), "val": ("validation", "val", "test")}
_MARKERS = ("dataset_dict.json", "state.json")  # every `save_to_disk` folder has one of them
_CHUNK = 1000  # rows that are encoded in one call

# Raised by `datasets` if the JSON files of a `save_to_disk` folder were changed.
_DAMAGED_FOLDER = (ValueError, LookupError, TypeError, AttributeError, RecursionError)

Row = TypeVar("Row")
Encoded = TypeVar("Encoded")


class Rows(Protocol):
    """The rows of one file."""

    columns: list[str]

    def __len__(self) -> int: ...

    def row(self, number: int) -> dict[str, Any]: ...

    def column(self, name: str) -> Iterable[Any]: ...

    def kinds(self, name: str) -> set[type]:
        """Return the classes of the values of a column."""
        ...

    def distinct(self, name: str) -> Iterable[Any]:
        """Return each value of a column of texts once, in any order."""
        ...

    def as_written(self, value: Any) -> Any:
        """Return messages or tool schemas of a row without the keys that the format added."""
        ...


class ArrowRows:
    """Rows of an Arrow table, in memory or mapped from disk."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.columns: list[str] = table.column_names

    def __len__(self) -> int:
        return self.table.num_rows

    def row(self, number: int) -> dict[str, Any]:
        return self.table.slice(number, 1).to_pylist()[0]

    def column(self, name: str) -> Iterator[Any]:
        for chunk in self.table.column(name).chunks:
            yield from chunk.to_pylist()

    def kinds(self, name: str) -> set[type]:
        column = self.table.column(name)
        first = pc.index(column.is_valid(), True).as_py()  # -1: all are null
        return {type(column[row].as_py()) for row in (0, first)}

    def distinct(self, name: str) -> Iterable[Any]:
        return self.table.column(name).unique().to_pylist()

    def as_written(self, value: Any) -> Any:
        return without_nulls(value)


class FolderRows(ArrowRows):
    """Rows that are mapped from a folder of `save_to_disk`; another process maps them again."""

    def __init__(self, table: pa.Table, path: Path, split: str) -> None:
        super().__init__(table)
        self._place = (path, split)

    def __reduce__(self) -> Any:
        return _open_folder, self._place


class ListRows:
    """Rows of JSON objects. A missing value is None."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = rows
        self.columns = list(dict.fromkeys(chain.from_iterable(rows)))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> dict[str, Any]:
        return {name: self._rows[number].get(name) for name in self.columns}

    def column(self, name: str) -> Iterator[Any]:
        return (row.get(name) for row in self._rows)

    def kinds(self, name: str) -> set[type]:
        return set(map(type, self.column(name)))

    def distinct(self, name: str) -> Iterable[Any]:
        return set(self.column(name))

    def as_written(self, value: Any) -> Any:
        return value


def without_nulls(value: Any) -> Any:
    """Return messages or tool schemas of an Arrow table without keys that are null.

    Arrow gives a dict the keys of the dicts at its place in all rows. Templates would write
    arguments of other tools into a call, and take a `tool_calls` that is null for calls.
    """
    if isinstance(value, list):
        return [without_nulls(part) for part in value]
    if not isinstance(value, dict):
        return value

    kept = {}
    for name, part in value.items():
        # Every message has a content, which may be null where it calls tools.
        is_content = name == "content" and "role" in value
        if part is not None or is_content:
            kept[name] = without_nulls(part)
    return kept


def as_file_list(files: Any) -> list[str]:
    """Return one path or a sequence of paths as a list, or raise DataError."""
    listed = [files] if isinstance(files, (str, Path)) else list(files or ())
    if not listed or not all(isinstance(file, (str, Path)) and str(file) for file in listed):
        raise DataError(f"Data files must be a path or a list of paths, got {files!r}.")
    return [str(file) for file in listed]


def open_rows(
    file: str | Path,
    split: str = "train",
    *,
    key: str | None = None,
    made_by: str = "a script of examples/data_preprocess",
) -> Rows:
    """Return the rows of a file or folder.

    Args:
        split: selects among several in a folder.
        key: configuration key that gives the file, for errors; None: that of the split.
        made_by: program that writes such a file, for errors.

    Raises DataError if it is missing, unreadable or empty, or its format is unknown, and
    OutOfMemoryError if it does not fit into the memory of the host.
    """
    path = Path(file).expanduser()
    if path.is_dir():
        rows: Rows = _open_folder(path, split)
    elif not path.is_file():
        raise DataError(_missing(file, path, key or f"data.{split}_files", made_by))
    elif path.stat().st_size == 0:
        raise DataError(
            f"Data file '{file}' is empty (0 bytes). Write it again, or remove it from the list."
        )
    elif (pointer := describe_pointers([path])) is not None:
        raise DataError(f"Data file {pointer}")
    elif path.suffix == ".parquet":
        rows = _open_parquet(path)
    elif path.suffix in (".json", ".jsonl"):
        with shortage_while_reading(path):
            rows = ListRows(read_json_rows(path))
    else:
        raise DataError(
            f"Data file '{file}' must be {FORMATS}, got the suffix '{path.suffix}'.{_convert(path)}"
        )

    if len(rows) == 0:
        raise DataError(
            f"Data file '{file}' has no rows. Write it again, or remove it from the list."
        )
    return rows


def has_split(file: str | Path, split: str) -> bool:
    """Return whether `file` is a `save_to_disk` folder of several splits with one for `split`."""
    marker = Path(file).expanduser() / "dataset_dict.json"
    if not marker.is_file():
        return False
    with _damage_errors(marker.parent):
        splits = parse_json(marker.read_text(encoding="utf-8"))["splits"]
        return any(name in SPLITS[split] for name in splits)


def require_column(file: str | Path, rows: Rows, column: str, key: str) -> None:
    """Raise DataError if the rows lack the column that the configuration names in `key`."""
    if column in rows.columns:
        return
    for name in rows.columns if len(rows) == 1 else ():
        if _is_list_of_rows(rows.row(0)[name]):
            raise DataError(
                f"{file}: the column '{column}' is missing, and the rows seem to be nested: the "
                f"one row has a list of them in '{name}'. Write that list alone into a file."
            )
    raise DataError(
        f"{file}: the column '{column}' is missing; columns found: "
        f"{', '.join(rows.columns) or 'none'}. Rename yours, or name it in {key}."
    )


def _is_list_of_rows(value: Any) -> bool:
    """Return whether a value is a list of dicts that are no messages of a chat."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(row, dict) and "role" not in row for row in value)


def is_no_media(value: Any) -> bool:
    """Return whether a value of the column of images or videos means that the row has none.

    Arrow may write a missing image as a dict of nulls.
    """
    if isinstance(value, dict):
        return all(part is None for part in value.values())
    return value is None or (isinstance(value, (list, str, bytes)) and not value)


@contextmanager
def errors_of_media(file: Path) -> Iterator[None]:
    """Raise DataError where the block cannot read a file with an image or a video."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the file '{file}' cannot be read ({error}). Make it readable, or leave the row out"
        ) from error


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Put the place in front of the message of every DataError in the block."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{place}: {error}.") from error


def encoded_in_chunks(
    file: str | Path,
    rows: Iterable[Row],
    encode: Callable[[list[Row]], list[Encoded]],
) -> Iterator[Encoded]:
    """Encode the rows of a file, many of them in one call.

    Raises DataError with the number of the first row that `encode` refuses.
    """
    rest = iter(rows)
    start = 0
    while many := list(islice(rest, _CHUNK)):
        try:
            encoded = encode(many)
        except DataError:
            for number, row in enumerate(many, start):
                with errors_at(f"{file}, row {number}"):  # the bad row also fails alone
                    encode([row])
            raise
        yield from encoded
        start += len(many)


def content_fingerprint(file: str | Path) -> str:
    """Return the hex digest of a file's bytes, or of all files of a folder with their names."""
    path = Path(file).expanduser()
    parts = [path]
    if path.is_dir():
        parts = sorted(part for part in path.rglob("*") if part.is_file())

    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.relative_to(path).as_posix().encode() + b"\0")
        with part.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _convert(path: Path) -> str:
    """Return how to make a Parquet file of a table in text; "" for other suffixes."""
    separators = {".csv": ",", ".tsv": "\\t"}
    if path.suffix not in separators:
        return ""
    source, target = shlex.quote(str(path)), shlex.quote(str(path.with_suffix(".parquet")))
    code = (
        "import sys, datasets; datasets.Dataset.from_csv(sys.argv[1], "
        f"sep='{separators[path.suffix]}').to_parquet(sys.argv[2])"
    )
    return f' Convert it: python -c "{code}" {source} {target}'


def _missing(file: str | Path, path: Path, key: str, made_by: str) -> str:
    """Return the message about a data file that does not exist."""
    folder = path.parent
    if not folder.is_dir():
        return (
            f"Data file '{file}' does not exist, nor does the folder '{folder}'. Correct the path "
            f"({key})."
        )

    matches = sorted(glob.glob(str(path)))
    if matches:
        more = ",..." if len(matches) > 3 else ""
        return (
            f"Data file '{file}' does not exist, and patterns are not expanded. Name the files: "
            f"{key}=[{','.join(matches[:3])}{more}]"
        )

    suffixes = (".parquet", ".json", ".jsonl")
    others = sorted(part.name for part in folder.iterdir() if part.suffix in suffixes)
    if others:
        found = f"data files in that folder: {', '.join(others[:8])}"
    else:
        found = "no data file is in that folder"
    return (
        f"Data file '{file}' does not exist; {found}. Correct the path ({key}), or make the file "
        f"with {made_by}."
    )


def _open_parquet(path: Path) -> Rows:
    try:
        with shortage_while_reading(path):
            _refuse_repeated_columns(path, pq.read_schema(path).names)
            table = pq.read_table(path)
            table.validate(full=True)  # texts in UTF-8: a tenth of a second a GB
        return ArrowRows(table)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")  # Arrow's may have several lines
        way_out = "Write it again."
        if isinstance(error, pa.ArrowInvalid) and _begins_as_json(path):
            way_out = "It begins as JSON does: give it a name that ends in .jsonl."
        raise DataError(
            f"Data file '{path}' is not readable as Parquet: {reason}. {way_out}"
        ) from error


def _begins_as_json(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(1) in (b"{", b"[")


def _refuse_repeated_columns(path: Path, names: Sequence[str]) -> None:
    """Raise DataError if several columns have one name: Arrow would not say which one it read."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(
            f"Data file '{path}' must have one column of each name, got several named "
            f"{', '.join(map(repr, repeated))} among {list(names)}. Rename or drop all but one, "
            "and write it again."
        )


def require_columns(row: Mapping[str, Any], names: Iterable[str], place: str) -> None:
    """Raise DataError if a raw row lacks one of the columns `names`.

    Args:
        row: as it was read.
        names: of the columns.
        place: of the row, for the message.
    """
    missing = [name for name in names if row.get(name) is None]
    if missing:
        raise DataError(
            f"{place}: the column {missing[0]!r} must have a value, got a row with the columns "
            f"{list(row)}. Name files of this data set, or rename the column."
        )


def _open_folder(path: Path, split: str) -> Rows:
    if not any((path / marker).is_file() for marker in _MARKERS):
        inside = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise DataError(
            f"Folder '{path}' was not written by datasets' save_to_disk (it holds {inside}). Name "
            "such a folder, or the data files themselves."
        )

    # Imported here: it takes 0.6 s, with pandas, and other formats do not need it.
    from datasets import DatasetDict, load_from_disk

    with _damage_errors(path):
        loaded = load_from_disk(str(path))

    if not isinstance(loaded, DatasetDict):
        return FolderRows(loaded.data.table, path, split)
    splits = {str(name): part for name, part in loaded.items()}
    for name in SPLITS[split]:
        if name in splits:
            return FolderRows(splits[name].data.table, path, split)
    raise DataError(
        f"Folder '{path}' has the splits {', '.join(splits)}, but none for {split}: expected "
        f"{' or '.join(SPLITS[split])}. Save it again under such a name."
    )


@contextmanager
def _damage_errors(folder: Path) -> Iterator[None]:
    """Raise DataError for any error of reading a `save_to_disk` folder with a damaged file."""
    try:
        with shortage_while_reading(folder):
            yield
    except (*_DAMAGED_FOLDER, OSError, pa.ArrowException) as error:
        raise DataError(
            f"Folder '{folder}' must be complete, as datasets' save_to_disk writes it, but cannot "
            f"be read ({describe_error(error)}). Save it again."
        ) from error


def load_from_hub(name: str, *arguments: Any, **keywords: Any) -> Any:
    """Call `datasets.load_dataset`. Raises DataError if the hub does not answer."""
    from datasets import load_dataset

    try:
        return load_dataset(name, *arguments, **keywords)
    except (ConnectionError, TimeoutError) as error:
        raise DataError(
            f"The data set '{name}' cannot be loaded from the hub: {error}. Fix the network "
            "(HF_ENDPOINT names a mirror, HF_HUB_OFFLINE=1 forbids access), or pass local files "
            "with --local_dataset_path."
        ) from error
