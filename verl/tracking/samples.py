"""Write samples as JSON lines, and convert values to the types of JSON."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl.utils.whole_file import whole_file


def plain(value: Any) -> Any:
    """Convert `value` to the types of JSON.

    NaN and infinities, which JSON lacks, become None. Tensors and arrays become nested lists, or
    numbers if they have no dimensions. Other objects become their str().
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, (np.generic, np.ndarray)) or hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(entry) for entry in value]
    return str(value)


# Values that JSON has are written as they are; `plain` is asked for the others alone.
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=plain)


def to_json(value: Any) -> str:
    """Format any value as valid JSON, see `plain`.

    Floats are written by repr: reading them back gives the same bits.
    """
    try:
        return _ENCODER.encode(value)
    except (ValueError, TypeError):  # NaN, infinities, or names that are no text
        return _ENCODER.encode(plain(value))


def to_json_line(row: Mapping[str, Any]) -> str:
    """Format one line of valid JSON, see `to_json`."""
    return to_json(row) + "\n"


def write_samples(folder: Path | str, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write `rows` to `folder/<step>.jsonl` and return that path.

    The file appears whole or not at all, and replaces that of an earlier attempt at the same step.
    Each line starts with "step", unless the row has its own.
    """
    path = Path(folder).expanduser() / f"{step}.jsonl"
    with (
        whole_file(path) as temporary,
        # Lone surrogates come from tokens that are half a character; JSON has them only as escapes.
        temporary.open("w", encoding="utf-8", errors="backslashreplace") as file,
    ):
        file.writelines(to_json_line({"step": step, **row}) for row in rows)
    return path
