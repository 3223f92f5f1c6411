"""Folders for sockets and notes of running processes, which the next start removes after a kill."""

import fcntl
import logging
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from verl.utils.errors import ConfigError
from verl.utils.logging import say_once

_PREFIX = "verl-"
_SUFFIX = ".tmp"
_MAX_BYTES = 96  # systems allow a socket 103 bytes or more, "/driver" included
# Descriptors of the folders that this process uses. Their locks end with the process, and with its
# forks.
_held: dict[Path, int] = {}


def make_scratch() -> Path:
    """Make a folder for this process, and remove those of processes that were killed.

    Warns where Python passes over $TMPDIR, as it does silently for a folder that takes no file.
    Raises ConfigError if its path is too long for a socket.
    """
    named = os.environ.get("TMPDIR")
    used = tempfile.gettempdir()
    if named and os.path.abspath(named) != used:
        say_once(
            f"TMPDIR={named} takes no file, so sockets and logs of this run lie in {used}. Make "
            "the folder, or unset TMPDIR.",
            logging.WARNING,
        )

    remove_left_behind()
    path = scratch_path(secrets.token_urlsafe(6))
    num_bytes = len(os.fsencode(path))
    if num_bytes > _MAX_BYTES:
        raise ConfigError(
            "The folder for temporary files must have a short path, because sockets of this run "
            f"lie there, and {path} is {num_bytes - _MAX_BYTES} bytes too long. Set TMPDIR to a "
            "shorter one, such as /tmp, on every machine."
        )
    hold_scratch(path)
    return path


def scratch_path(name: str, parent: Path | None = None) -> Path:
    """Return the path of a folder that several processes of this machine may hold.

    It is in the system's folder for temporary files, or in `parent`.
    """
    return (parent or Path(tempfile.gettempdir())) / f"{_PREFIX}{name}{_SUFFIX}"


def hold_scratch(path: Path) -> None:
    """Make the folder if it is missing, and keep it until this process and all other holders end.

    Raises OSError if the folder cannot be made.
    """
    while path not in _held:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # another process has just removed it
            continue

        # Some network file systems have no locks for folders. Nothing is removed there.
        with suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_SH)
        if _is_at(path, folder):
            _held[path] = folder
        else:
            os.close(folder)


def remove_scratch(path: Path) -> None:
    """Remove the folder, whoever holds it."""
    shutil.rmtree(path, ignore_errors=True)
    folder = _held.pop(path, None)
    if folder is not None:
        os.close(folder)


def remove_left_behind(parent: Path | None = None) -> None:
    """Remove the folders of this user that no process holds."""
    pattern = scratch_path("*", parent)
    for path in pattern.parent.glob(pattern.name):
        if path not in _held:
            with suppress(OSError):  # another user's, in use, or removed meanwhile
                _remove_unheld(path)


def _remove_unheld(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_own = os.fstat(folder).st_uid == os.getuid()
        if is_own and _is_at(path, folder):
            shutil.rmtree(path)
    finally:
        os.close(folder)


def _is_at(path: Path, folder: int) -> bool:
    """Return whether the open folder is still the one at `path`."""
    try:
        found = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(folder))
