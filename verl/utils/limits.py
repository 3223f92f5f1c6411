"""What the system lets this process have."""

import errno
import math
import os
import resource
import tempfile
from pathlib import Path


def largest_file() -> float:
    """The bytes that no file may grow beyond (`ulimit -f`); infinity without such a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return math.inf if limit == resource.RLIM_INFINITY else limit


def grown_too_large(folder: Path, error: BaseException) -> str | None:
    """Whether what ended the writing of a folder is the size that no file may grow beyond:
    safetensors tells, torch leaves a file that stands there."""
    limit = largest_file()
    sizes = (file.stat().st_size for file in folder.rglob("*") if file.is_file())
    is_told = os.strerror(errno.EFBIG) in str(error) and limit < math.inf
    if not is_told and max(sizes, default=0) < limit:
        return None
    return (
        f"no file may grow beyond {limit / 2**20:.3g} MiB here (ulimit -f). Start from a shell "
        "without that limit."
    )


def make_writable(folder: Path) -> None:
    """Make the folder. OSError where no file can be written in it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
