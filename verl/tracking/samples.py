"""Samples as JSON lines, and what counts as JSON here."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """`value` in JSON's own types. NaN and infinities, which JSON has not, become null; unknown
    objects their str().

    Tensors and arrays become (nested) lists; those of one element without dimensions become
    numbers.
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


def to_json_line(row: Mapping[str, Any]) -> str:
    """One line of valid JSON. Floats are written by repr: reading them back gives the same bits."""
    return json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n"


def write_samples(folder: Path | str, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write `rows` to `folder/<step>.jsonl` and return that path.

    The file appears whole or not at all, and replaces the one of an earlier attempt at the same
    step. Each line gets "step" in front, unless the row has one.
    """
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step}.jsonl"
    temporary = folder / f".{step}.jsonl.tmp-{os.getpid()}"
    try:
        # Lone surrogates come from tokens that are half a character; JSON carries them as escapes
        # only.
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(to_json_line({"step": step, **row}) for row in rows)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
