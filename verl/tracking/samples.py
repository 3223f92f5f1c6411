"""Write the samples of a step as a file of JSON lines."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl.tracking.json_lines import to_json_line
from verl.utils.whole_file import whole_file


def samples_file(folder: Path | str, step: int) -> Path:
    """Return the file of the samples of a step."""
    return Path(folder).expanduser() / f"{step}.jsonl"


def write_samples(folder: Path | str, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write `rows` to `samples_file` and return that path.

    The file appears whole or not at all, and replaces that of an earlier attempt at the same step.
    Each line starts with "step", unless the row has its own.
    """
    path = samples_file(folder, step)
    with whole_file(path) as temporary, temporary.open("wb") as file:
        file.writelines(to_json_line({"step": step, **row}) for row in rows)
    return path
