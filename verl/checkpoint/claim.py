"""Let one process at a time write into a folder."""

import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

from verl.utils.logging import logger
from verl.utils.whole_file import errors_name


class Claim:
    """A lock on a file in `folder`. It ends with the process, and forks do not inherit it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / ".in_use"
        self._held: TextIO | None = None

    @property
    def is_held(self) -> bool:
        """Return whether this process holds the lock."""
        return self._held is not None

    @property
    def is_removed(self) -> bool:
        """Return whether the lock is held on a file that is no longer in the folder."""
        if self._held is None:
            return False
        try:
            found = self.file.stat()
        except FileNotFoundError:
            return True
        return not os.path.samestat(found, os.fstat(self._held.fileno()))

    def take(self) -> str | None:
        """Try to take the lock: return None, or the process that holds it.

        Raises OSError if the folder is not writable.
        """
        if self._held is not None:
            return None

        file = self.file.open("a+", encoding="utf-8")
        try:
            # Not flock, because forked children inherit its locks.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            holder = file.read() or "unknown"
            file.close()
            return holder
        except OSError as error:
            logger.info(
                "%s does not support locks (%s); make sure that no other run writes there.",
                self.file.parent,
                error.strerror,
            )

        with errors_name(self.file):
            file.truncate(0)
            file.write(f"pid {os.getpid()} on {socket.gethostname()}")
            file.flush()
        self._held = file
        return None

    def give_back(self) -> None:
        """Release the lock."""
        if self._held is not None:
            self._held.close()
            self._held = None
