"""Describe a YAML file that cannot be read."""

from pathlib import Path
from typing import Any

import yaml


def explain_yaml(error: yaml.YAMLError | UnicodeDecodeError, path: str | Path | None = None) -> str:
    """Return one sentence about a mistake in a YAML file, with its line and column.

    Without a path the file is named as the parser knows it.
    """
    if isinstance(error, UnicodeDecodeError):
        file = "A YAML file" if path is None else f"'{path}'"
        byte = error.object[error.start]
        return (
            f"{file} is not text in UTF-8: got byte {byte:#04x} at position {error.start}. Save "
            "it in that encoding."
        )

    mark = getattr(error, "problem_mark", None)
    if mark is None:
        name = path or getattr(error, "name", "The YAML text")
        reason = getattr(error, "reason", None) or str(error).splitlines()[0]
        position = getattr(error, "position", None)
        where = "" if position is None else f" at position {position}"
        return f"'{name}' is not YAML: {reason}{where}."

    return (
        f"'{path or mark.name}', {_place(mark)}, is not YAML: {getattr(error, 'problem', None)}"
        f"{_context(error)}. Indent with spaces, and quote texts with special characters."
    )


def _context(error: Any) -> str:
    if not error.context:
        return ""
    mark = error.context_mark
    begins = "" if mark is None else f" that begins in {_place(mark)}"
    return f" ({error.context}{begins})"


def _place(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"
