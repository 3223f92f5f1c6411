"""Care for a file of JSON lines whose writer may have been killed."""

import os
from pathlib import Path

from verl.utils.json_text import parse_json
from verl.utils.logging import logger


def repair_last_line(path: Path) -> None:
    """Cut off a last line without its end, which a crash left behind; the next line would be glued
    to it."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        whole = content[: content.rfind(b"\n") + 1]
        logger.warning(
            "%s ended in the midst of a line (%d bytes); they are cut off.",
            path,
            len(content) - len(whole),
        )
        os.truncate(path, len(whole))


def drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines whose "step" is at most `step`, byte for byte; a line that is no JSON goes,
    with a warning."""
    if not path.exists():
        return
    kept: list[bytes] = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            row = parse_json(line)
        except ValueError:
            logger.warning("Line %d of %s is no JSON and is dropped.", number, path)
            continue
        line_step = row.get("step", 0) if isinstance(row, dict) else None
        if not isinstance(line_step, (int, float)):
            logger.warning("Line %d of %s is no line of metrics and is dropped.", number, path)
        elif line.endswith(b"\n") and line_step <= step:
            kept.append(line)

    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_bytes(b"".join(kept))
    os.replace(temporary, path)
