"""Write a file that other processes never see in part; repair one that a crash cut off."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BLOCK_BYTES = 65536


@contextmanager
def whole_file(path: Path, *, flush: bool = False) -> Iterator[Path]:
    """Give a path to write to, in the same folder. It becomes `path` at the end of the block.

    The folder is made if it is missing. After an error `path` is as it was before.

    Args:
        path: of the file.
        flush: whether it is on the disk then, so that it outlives a machine that goes down.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Processes of several machines, which may have equal ids, can share the folder.
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with errors_name(path):
            yield temporary
            if flush:
                sync(temporary)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if flush:
        sync(path.parent)


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Name `path` in errors of the system that name no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def cut_unfinished_line(path: Path) -> int:
    """Cut off an incomplete last line, which a crash left behind. Return its number of bytes."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end > 0:
            begin = max(end - _BLOCK_BYTES, 0)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin

    if end < size:
        os.truncate(path, end)
    return size - end


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows has no handles of folders to flush
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
