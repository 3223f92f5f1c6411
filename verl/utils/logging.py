"""The logger of the package, and messages that are logged once."""

import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from verl.utils.secrets import masked
from verl.utils.streams import reopen_streams, show_every_character

logger = logging.getLogger("verl")


def _hide_secrets(record: logging.LogRecord) -> bool:
    """Replace the text of a record by one without secrets, for every handler."""
    record.msg = masked(record.getMessage())
    record.args = ()
    return True


logger.addFilter(_hide_secrets)


class _Stdout(logging.StreamHandler):
    """Writes to standard output, also after code of a user has closed it."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(self.stream, "closed", False):
            reopen_streams()
            self.stream = sys.stdout
        super().emit(record)


def configure_logging(level: int = logging.INFO) -> None:
    """Send the package's log to stdout, one line per record.

    Entry points call this; importing the package never does.
    """
    show_every_character()
    if not logger.handlers:
        handler = _Stdout(sys.stdout)
        handler.setFormatter(logging.Formatter("%(levelname).1s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level)


def show_log() -> None:
    """Show the package's log in a program or a notebook, as commands do.

    This changes nothing in a program that has handlers of its own. It keeps a level that was set
    before, such as `logging.getLogger("verl").setLevel(logging.WARNING)`. Ranks other than the
    first show warnings only.
    """
    shown_already = logger.hasHandlers() and logger.isEnabledFor(logging.INFO)
    if logger.handlers or shown_already:
        return
    configure_logging(logger.level or level_of_rank())


def level_of_rank() -> int:
    """Return the level of this process's log: one rank logs for all, the others only warn."""
    is_first = os.environ.get("RANK", "0") == "0"
    return logging.INFO if is_first else logging.WARNING


@contextmanager
def silenced() -> Iterator[None]:
    """Log nothing within this context."""
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


@functools.cache
def say_once(message: str, level: int = logging.INFO) -> None:
    """Log `message` on the first call with it, for facts that hold for a whole run."""
    logger.log(level, message)
