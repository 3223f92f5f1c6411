"""Standard output and error, which code of a user may close."""

import io
import os
import sys

_reported: set[str] = set()  # streams that were opened again with a message


def show(text: str) -> None:
    """Print a line at once, also if code of a user has closed standard output."""
    reopen_streams()
    print(text, flush=True)


def show_every_character() -> None:
    """Let the streams write a character that their encoding lacks as an escape.

    Otherwise a prompt in Chinese on a terminal in Latin-1, or half a character, ends the run.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.closed:
            stream.reconfigure(errors="backslashreplace")


def reopen_streams() -> None:
    """Open standard output and error again if code of the run has closed them.

    Python leaves their descriptors open. A stream that was missing from the start stays so.
    """
    closed = []
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if getattr(stream, "closed", False):
            again = os.fdopen(number, "w", buffering=1, encoding=stream.encoding, closefd=False)
            setattr(sys, name, again)
            show_every_character()
            closed.append(f"sys.{name}")

    new = [name for name in closed if name not in _reported]
    _reported.update(new)
    if new:
        names = " and ".join(new)
        print(
            f"W A part of this run (a reward function, say) closed {names}, which the run needs. "
            "It is open again. Remove the call of close() there.",
            file=sys.stderr,
            flush=True,
        )
