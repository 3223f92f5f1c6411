"""`python -m verl.single_controller.ray_upload FOLDER`: what Ray would send of a working directory,
largest first.

`connect` says the same where Ray refuses an upload.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ray._private.thirdparty.pathspec import PathSpec  # the patterns are Ray's own

from verl.utils.errors import ConfigError

# What a working directory holds that no worker reads from it.
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
    """(bytes, path in `folder`) of what Ray packs, largest first: all but `excludes`, which are
    patterns as of .gitignore, and what .rayignore and .gitignore files say."""
    found = _walk(folder, [(folder, PathSpec.from_lines("gitwildmatch", excludes))])
    return sorted(
        ((path.stat().st_size, str(path.relative_to(folder))) for path in found), reverse=True
    )


def _walk(folder: Path, ignored: list[tuple[Path, Any]]) -> Iterator[Path]:
    names = [
        ".rayignore",
        *([] if os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE") == "1" else [".gitignore"]),
    ]
    files = [folder / name for name in names if (folder / name).is_file()]
    ignored = ignored + [
        (folder, PathSpec.from_lines("gitwildmatch", file.read_text().splitlines()))
        for file in files
    ]

    for path in folder.iterdir():
        if any(patterns.match_file(str(path.relative_to(root))) for root, patterns in ignored):
            continue
        if path.is_dir():
            yield from _walk(path, ignored)
        elif path.is_file():
            yield path


def refused_upload(error: Exception, runtime_env: Mapping[str, Any]) -> ConfigError | None:
    """What to tell where Ray refused to take the local folders of `runtime_env`; None for any other
    error."""
    if not _REFUSALS.search(str(error)):
        return None
    folders = [
        Path(str(given))
        for given in (runtime_env.get("working_dir"), *runtime_env.get("py_modules", ()))
    ]
    folders = [folder.absolute() for folder in folders if folder.is_dir()]
    if not folders:
        return None
    return ConfigError(
        f"Ray refused to upload runtime_env's {', '.join(map(str, folders))}: "
        f"{' '.join(str(error).split())[:300]}\n"
        + "\n".join(report(folder, runtime_env.get("excludes", ())) for folder in folders)
    )


def report(folder: Path, excludes: Sequence[str]) -> str:
    """The largest files that are uploaded, and how to leave them out."""
    files = uploaded_files(folder, excludes)
    largest = "\n".join(f"  {_mib(size):>11}  {name}" for size, name in files[:_SHOWN])
    return (
        f"{len(files)} files of {folder} are uploaded, {_mib(sum(size for size, _ in files))} "
        f"before compression. The largest:\n{largest}\nName what no worker reads in runtime_env's "
        "`excludes` (patterns as of .gitignore), or in a file .rayignore of that folder; data and "
        "models belong on a disk that all nodes see."
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    print(report(Path(sys.argv[1] if len(sys.argv) > 1 else ".").absolute(), EXCLUDES))
