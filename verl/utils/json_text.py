"""Read JSON and texts that a user, a model or another program wrote."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any


class RepeatedKeyError(ValueError):
    """An object of a JSON text has a key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of its keys and values. Raises RepeatedKeyError."""
    values = dict(pairs)
    if len(values) == len(pairs):
        return values
    ((key, count),) = Counter(key for key, _ in pairs).most_common(1)
    raise RepeatedKeyError(f"it has the key {key!r} {count} times; keep one of them")


_OF_UNIQUE_KEYS = json.JSONDecoder(object_pairs_hook=_unique)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError with a short reason for any other text.

    `json.loads` raises RecursionError for text that is nested too deeply; this raises ValueError.
    """
    return _parse(json.loads, text)


def parse_data(text: str) -> Any:
    """Return the value of a JSON text as `parse_json` does, which keeps the last of equal keys.

    Raises RepeatedKeyError for an object with equal keys. Reading takes a quarter longer.
    """
    return _parse(_OF_UNIQUE_KEYS.decode, text)


def _parse(read: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        return read(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError, RepeatedKeyError)):
            raise
        digits = sys.get_int_max_str_digits()
        raise ValueError(
            f"it has a number of more than {digits} digits, which Python does not read; write it "
            "as a text, in quotes"
        ) from error


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Return the values of a JSON object. Raises ValueError with a short reason for another text."""
    values = parse_json(text)
    if not isinstance(values, dict):
        raise ValueError(f"it holds a {type(values).__name__} instead of an object")
    return values


def whole_number(text: str) -> int | None:
    """Return the number that a text of digits stands for; None if it is too long to read.

    Python reads up to 4,300 digits, and a model that repeats itself writes more.
    """
    try:
        return int(text)
    except ValueError:
        return None


def whole_characters(text: str) -> str:
    """Replace halves of characters (lone surrogates), which no tokenizer takes, by U+FFFD.

    They come from texts that were cut within the escapes of JSON. Two halves that belong together
    become their character.
    """
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
