"""One logger for the package, and a way to say a thing once."""

import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from verl.utils.secrets import masked

logger = logging.getLogger("verl")


def _hide_secrets(record: logging.LogRecord) -> bool:
    """Put the text without secrets into a record, whoever prints it."""
    record.msg = masked(record.getMessage())
    record.args = ()
    return True


logger.addFilter(_hide_secrets)


def configure_logging(level: int = logging.INFO) -> None:
    """Send the package's log to stdout, one line a record. Called by entry points, never on
    import."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(levelname).1s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level)


def show_log() -> None:
    """Show the package's log in a program or a notebook, as commands do.

    A program that shows it already, by handlers of its own, is left alone. A level that was set
    before stays: `logging.getLogger("verl").setLevel(logging.WARNING)` is quiet by choice. Ranks
    other than the first show warnings only.
    """
    shown_already = logger.hasHandlers() and logger.isEnabledFor(logging.INFO)
    if logger.handlers or shown_already:
        return
    is_first = os.environ.get("RANK", "0") == "0"
    configure_logging(logger.level or (logging.INFO if is_first else logging.WARNING))


@contextmanager
def silenced() -> Iterator[None]:
    """No line of the log while it is open."""
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


@functools.cache
def say_once(message: str, level: int = logging.INFO) -> None:
    """Log `message` the first time it comes, for facts that hold for a whole run."""
    logger.log(level, message)
