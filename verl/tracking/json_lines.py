"""Format values as lines of JSON; repair and cut files of such lines."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl.utils.json_text import parse_json
from verl.utils.logging import logger
from verl.utils.whole_file import cut_unfinished_line, whole_file

# The metric of lines that were written during a later step than their own: the number of that step.
WRITTEN_IN_STEP = "val-aux/written_in_step"


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


def to_json(value: Any) -> bytes:
    """Format any value as valid JSON in UTF-8, see `plain`.

    Floats are written by repr: reading them back gives the same bits.
    """
    try:
        text = _ENCODER.encode(value)
    except (ValueError, TypeError):  # NaN, infinities, or names that are no text
        text = _ENCODER.encode(plain(value))
    # Lone surrogates come from tokens that are half a character. JSON has them only as escapes.
    return text.encode("utf-8", errors="backslashreplace")


def to_json_line(row: Mapping[str, Any]) -> bytes:
    """Format one line of valid JSON, see `to_json`."""
    return to_json(row) + b"\n"


def repair_last_line(path: Path) -> None:
    """Cut off an incomplete last line, which a crash left behind.

    The next line would be joined to it.
    """
    if not path.exists():
        return
    num_bytes = cut_unfinished_line(path)
    if num_bytes:
        logger.warning("%s ended in the middle of a line; cut off its %d bytes.", path, num_bytes)


def drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines that were written in steps up to `step`, byte for byte.

    At step 0 all lines go, since a run that starts over logs step 0 again. Lines that are no JSON
    are dropped, with a warning.
    """
    if not path.exists():
        return

    kept: list[bytes] = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            row = parse_json(line)
        except ValueError:
            logger.warning("Dropped line %d of %s, which is no JSON.", number, path)
            continue

        line_step = _written_in(row) if isinstance(row, dict) else None
        if not isinstance(line_step, (int, float)):
            logger.warning("Dropped line %d of %s, which holds no metrics.", number, path)
        elif step > 0 and line_step <= step and line.endswith(b"\n"):
            kept.append(line)

    with whole_file(path) as temporary:
        temporary.write_bytes(b"".join(kept))


def _written_in(row: Mapping[str, Any]) -> Any:
    """Return the step during which a line was written: its own, or a later one."""
    metrics = row.get("metrics", row)
    if isinstance(metrics, Mapping) and WRITTEN_IN_STEP in metrics:
        return metrics[WRITTEN_IN_STEP]
    return row.get("step", 0)
