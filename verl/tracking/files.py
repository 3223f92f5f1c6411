"""Repair and cut files of JSON lines whose writer may have been killed."""

import os
from pathlib import Path

from verl.utils.json_text import parse_json
from verl.utils.logging import logger


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
    """Keep the lines whose "step" is at most `step`, byte for byte.

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

        line_step = row.get("step", 0) if isinstance(row, dict) else None
        if not isinstance(line_step, (int, float)):
            logger.warning("Dropped line %d of %s, which holds no metrics.", number, path)
        elif line.endswith(b"\n") and line_step <= step:
            kept.append(line)

    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_bytes(b"".join(kept))
    os.replace(temporary, path)
