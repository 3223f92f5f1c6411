"""Recognize pointers of Git LFS, which stand for files that were not downloaded."""

import shlex
from collections.abc import Iterable
from pathlib import Path

_FIRST_BYTES = b"version https://git-lfs.github.com/"


def describe_pointers(files: Iterable[Path]) -> str | None:
    """Name the first pointer among these files and the way to its content; None if none is one."""
    for file in files:
        with file.open("rb") as stream:
            is_pointer = stream.read(len(_FIRST_BYTES)) == _FIRST_BYTES
        if is_pointer:
            return (
                f"'{file}' is a pointer of Git LFS, not the file itself. Get the files: git -C "
                f"{shlex.quote(str(file.parent))} lfs pull (or download them without git)."
            )
    return None
