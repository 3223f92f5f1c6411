"""`python -m verl.single_controller.ray_upload FOLDER`: list the files that Ray would upload.

The largest come first. `connect` reports the same if Ray refuses an upload.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray._private.thirdparty.pathspec import PathSpec  # the patterns are Ray's own

from verl.utils.errors import ConfigError

# Files in a working directory that no worker reads.
EXCLUDES = [
    "checkpoints/",
    "outputs/",
    "wandb/",
    ".git/",
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.distcp",
]
_REFUSALS = re.compile(
    r"exceeds the maximum size|too large|larger than max|failed to upload|failed to store package",
    re.IGNORECASE,
)
_SHOWN = 5


def uploaded_files(folder: Path, excludes: Sequence[str]) -> list[tuple[int, str]]:
    """Return (bytes, path in `folder`) of the files that Ray uploads, largest first.

    These are all files except those that match `excludes`, patterns as in .gitignore, or the
    patterns of .rayignore and .gitignore files.
    """
    patterns = PathSpec.from_lines("gitwildmatch", excludes)
    files: list[tuple[int, str]] = []
    for path in _walk(folder, [(folder, patterns)]):
        files.append((path.stat().st_size, str(path.relative_to(folder))))
    return sorted(files, reverse=True)


def _walk(folder: Path, ignored: list[tuple[Path, Any]]) -> Iterator[Path]:
    names = [".rayignore"]
    if os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE") != "1":
        names.append(".gitignore")

    ignored = list(ignored)
    for name in names:
        file = folder / name
        if file.is_file():
            lines = file.read_text().splitlines()
            ignored.append((folder, PathSpec.from_lines("gitwildmatch", lines)))

    for path in folder.iterdir():
        if any(patterns.match_file(str(path.relative_to(root))) for root, patterns in ignored):
            continue
        if path.is_dir():
            yield from _walk(path, ignored)
        elif path.is_file():
            yield path


def refused_upload(error: Exception, runtime_env: Mapping[str, Any]) -> ConfigError | None:
    """Return the error to raise if Ray refused to upload folders of `runtime_env`.

    Returns None for any other error.
    """
    if not _REFUSALS.search(str(error)):
        return None

    folders: list[Path] = []
    for given in (runtime_env.get("working_dir"), *runtime_env.get("py_modules", ())):
        folder = Path(str(given))
        if folder.is_dir():
            folders.append(folder.absolute())
    if not folders:
        return None

    excludes = runtime_env.get("excludes", ())
    reports = "\n".join(report(folder, excludes) for folder in folders)
    return ConfigError(
        f"Ray refused to upload runtime_env's {', '.join(map(str, folders))}: "
        f"{' '.join(str(error).split())[:300]}\n{reports}"
    )


def report(folder: Path, excludes: Sequence[str]) -> str:
    """Describe the largest uploaded files, and how to exclude files."""
    files = uploaded_files(folder, excludes)
    total = sum(size for size, _ in files)
    largest = "\n".join(f"  {_mib(size):>11}  {name}" for size, name in files[:_SHOWN])
    return (
        f"{len(files)} files of {folder} are uploaded, {_mib(total)} before compression. The "
        f"largest:\n{largest}\nList files that no worker reads in runtime_env's `excludes` "
        "(patterns as in .gitignore), or in a file .rayignore of that folder. Data and models "
        "belong on a disk that all nodes can access."
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    print(report(Path(sys.argv[1] if len(sys.argv) > 1 else ".").absolute(), EXCLUDES))
