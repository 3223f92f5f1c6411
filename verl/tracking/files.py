"""Repair and cut files of JSON lines whose writer may have been killed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.utils.json_text import parse_json
from verl.utils.logging import logger
from verl.utils.whole_file import whole_file

# The metric of lines that were written during a later step than their own: the number of that step.
WRITTEN_IN_STEP = "val-aux/written_in_step"


def repair_last_line(path: Path) -> None:
    """Cut off an incomplete last line, which a crash left behind.

    The next line would be joined to it.
    """
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        whole = content[: content.rfind(b"\n") + 1]
        num_bytes = len(content) - len(whole)
        logger.warning("%s ended in the middle of a line; cut off its %d bytes.", path, num_bytes)
        os.truncate(path, len(whole))


def drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines that were written in steps up to `step`, byte for byte.

    Lines that are no JSON are dropped, with a warning.
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
        elif line.endswith(b"\n") and line_step <= step:
            kept.append(line)

    with whole_file(path) as temporary:
        temporary.write_bytes(b"".join(kept))


def _written_in(row: Mapping[str, Any]) -> Any:
    """Return the step during which a line was written: its own, or a later one."""
    metrics = row.get("metrics", row)
    if isinstance(metrics, Mapping) and WRITTEN_IN_STEP in metrics:
        return metrics[WRITTEN_IN_STEP]
    return row.get("step", 0)
