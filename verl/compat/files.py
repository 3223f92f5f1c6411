"""Files and checkpoints by verl 0.5's names. Paths must be local or mounted; HDFS is an error."""

import os
import shutil
from pathlib import Path

from verl.checkpoint.manager import LATEST_FILE
from verl.utils.errors import CheckpointError, ConfigError


def is_non_local(path: str) -> bool:
    """Return whether a path is on a file system of Hadoop."""
    return path.startswith("hdfs://")


def copy_to_local(
    src: str,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
) -> str:
    """Return the path itself, which is local already or a hub id."""
    _require_local(src)
    if use_shm:
        raise ConfigError(
            f"copy_to_local(use_shm=True) is not in this version. Copy '{src}' to /dev/shm, and "
            "give that path."
        )
    return src


def exists(path: str, **kwargs: object) -> bool:
    """Return whether there is a file or folder at `path`."""
    _require_local(path)
    return os.path.exists(path)


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: object) -> None:
    """Create a folder and its parents."""
    _require_local(name)
    os.makedirs(name, mode=mode, exist_ok=exist_ok)


def copy(src: str, dst: str, **kwargs: object) -> bool:
    """Copy a file, or a folder with its contents; return True."""
    _require_local(src)
    _require_local(dst)
    if Path(src).is_dir():
        shutil.copytree(src, dst, dirs_exist_ok=bool(kwargs.get("dirs_exist_ok")))
    else:
        shutil.copy(src, dst)
    return True


def _require_local(path: str) -> None:
    if is_non_local(path):
        raise ConfigError(
            f"Paths must be local, got '{path}'. Mount the file system, or fetch the files first "
            "(hdfs dfs -get)."
        )


def get_checkpoint_tracker_filename(root_path: str) -> str:
    """Return the path of the file with the number of the newest checkpoint."""
    return os.path.join(root_path, LATEST_FILE)


def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
    """Return the folder of the newest checkpoint below `path`; None if there is none.

    Raises CheckpointError if the file with its number holds none.
    """
    if path is None:
        return None
    tracker = Path(get_checkpoint_tracker_filename(path))
    if not tracker.is_file():
        return None

    text = tracker.read_text()
    if not text.strip().isdecimal():
        raise CheckpointError(
            f"{tracker} must hold the step of the newest checkpoint, got {text[:40]!r}. Write the "
            "number of a folder global_step_N there, or remove the file."
        )
    folder = os.path.join(path, directory_format.format(int(text)))
    return folder if os.path.exists(folder) else None
