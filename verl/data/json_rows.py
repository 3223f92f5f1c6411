"""Read rows from JSON: lines of objects, an array of objects, or one object."""

import gzip
import json
import zlib
from itertools import chain
from pathlib import Path
from typing import Any

from verl.utils.errors import DataError
from verl.utils.json_text import RepeatedKeyError, parse_data

_GZIP = b"\x1f\x8b"  # the first bytes of a file packed by gzip
_PARQUET = b"PAR1"


def read_json_rows(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines, or one JSON array, of objects; a file named .gz is unpacked.

    Raises DataError with the line or element that is not an object.
    """
    text = _read_text(path)
    if text.lstrip().startswith("["):
        try:
            rows = list(enumerate(parse_data(text), start=1))
        except ValueError as error:
            raise DataError(f"Data file '{path}' is not a JSON array: {error}.") from error
        return [_json_object(path, f"element {number}", row) for number, row in rows]

    whole = _one_object(path, text)
    if whole is not None:
        _refuse_columns(path, whole)
        return [whole]

    # Only "\n" ends a line: str.splitlines also cuts at separators that JSON allows in strings.
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append(_parse_line(path, number, line))
    return rows


def _one_object(path: Path, text: str) -> dict[str, Any] | None:
    """Return the object that is the whole text, over several lines too; None for another text.

    Raises DataError for an object with equal keys, which may also be that of the first line.
    """
    try:
        whole = parse_data(text)
    except RepeatedKeyError as error:
        raise DataError(f"Data file '{path}', the object at its start: {error}.") from error
    except ValueError:  # of JSON lines, after the first of them
        return None
    return whole if isinstance(whole, dict) else None


def _refuse_columns(path: Path, whole: dict[str, Any]) -> None:
    """Raise DataError for an object of columns: their values in lists, or by the row's number."""
    columns = list(whole.values())
    if columns and all(isinstance(column, dict) and "0" in column for column in columns):
        raise DataError(
            f"Data file '{path}' must have one JSON object for each row, got one for each column, "
            "as pandas writes them by default. Write it with "
            "DataFrame.to_json(path, orient='records', lines=True)."
        )

    if _are_lists_of_values(columns):
        raise DataError(
            f"Data file '{path}' must have one JSON object for each row, got lists of "
            f"{len(columns[0])} values for the columns {', '.join(whole)}. Write it with "
            "datasets.Dataset.from_dict(columns).to_json(path)."
        )


def _are_lists_of_values(columns: list[Any]) -> bool:
    """Return whether columns are lists of equal length, none of them the messages of one row."""
    if len(columns) < 2 or not all(isinstance(column, list) for column in columns):
        return False
    if len(set(map(len, columns))) > 1:
        return False
    parts = chain.from_iterable(columns)
    return not any(isinstance(part, dict) and "role" in part for part in parts)


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        return content.decode("utf-8-sig")  # editors on Windows write a mark of the byte order

    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"Data file '{path}' cannot be unpacked ({error}). Get it again, or name it without "
            ".gz."
        ) from error

    except UnicodeDecodeError as error:
        if error.object.startswith(_GZIP):
            raise DataError(
                f"Data file '{path}' must be plain text, got one packed by gzip. Unpack it."
            ) from error
        if error.object.startswith(_PARQUET):
            raise DataError(
                f"Data file '{path}' must be text, got a Parquet file. Give it a name that ends in "
                ".parquet."
            ) from error
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"Data file '{path}', line {line}, must be text in UTF-8, got the byte "
            f"0x{error.object[error.start]:02x} ({error.reason}). Convert the file, for example "
            "with iconv -f LATIN1 -t UTF-8 or -f UTF-16."
        ) from error


def _parse_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = parse_data(line)
    except ValueError as error:
        raise DataError(
            f"Data file '{path}', line {number}, must be one JSON object a line: {_reason(error)}."
        ) from error
    return _json_object(path, f"line {number}", value)


def _reason(error: ValueError) -> str:
    """Return the reason and the column; the line is 1, since the text is one line of the file."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (column {error.colno})"
    return str(error)


def _json_object(path: Path, where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(
            f"Data file '{path}', {where}, must be a JSON object such as {{\"prompt\": [...]}}, "
            f"got {type(value).__name__}."
        )
    return value
