"""Processes that run a module of this package: their search path, and their end with the parent."""

import os
import select
import signal
import threading
from pathlib import Path

# The folder that a child needs in its search path to import this `verl`.
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


def search_path() -> str:
    """Return PYTHONPATH for a child that imports this `verl`; the user's own entries come after."""
    paths = [PACKAGE_ROOT]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return os.pathsep.join(paths)


def end_with_parent(connection: int) -> None:
    """End this process, and all that it starts, once the other end of a connection is closed.

    This works in the middle of a call, which may hang forever. The process must lead a session of
    its own.

    Args:
        connection: descriptor of a pipe or a socket, which the parent's end closes as well.
    """
    threading.Thread(target=_wait_and_end, args=(connection,), daemon=True).start()


def _wait_and_end(connection: int) -> None:
    poll = select.poll()
    poll.register(connection, 0)  # reports only that the other end is closed
    poll.poll()
    os.killpg(0, signal.SIGKILL)
