"""Limits that the system sets for this process."""

import errno
import math
import os
import resource
import tempfile
from pathlib import Path


def largest_file() -> float:
    """Return the largest size of a file in bytes (`ulimit -f`); infinity without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return math.inf if limit == resource.RLIM_INFINITY else limit


def grown_too_large(folder: Path, error: BaseException) -> str | None:
    """Describe the limit of file sizes if writing to `folder` failed because of it, else None.

    safetensors names the limit in its error. torch does not, but leaves a file of the largest size.
    """
    limit = largest_file()
    sizes = (file.stat().st_size for file in folder.rglob("*") if file.is_file())
    error_names_limit = os.strerror(errno.EFBIG) in str(error) and limit < math.inf
    if not error_names_limit and max(sizes, default=0) < limit:
        return None
    return (
        f"no file may grow beyond {limit / 2**20:.3g} MiB here (ulimit -f). Start from a shell "
        "without that limit."
    )


def make_writable(folder: Path) -> None:
    """Create the folder. Raises OSError if no file can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, f"'{folder}' is a file", str(folder)) from error
    with tempfile.TemporaryFile(dir=folder):
        pass
