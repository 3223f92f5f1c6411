"""Processes that run code of this package: their start, and their end with the parent."""

import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

START_TIMEOUT_S = 120.0  # imports on a busy machine

# The folder that a child needs in its search path to import this `verl`.
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


def search_path() -> str:
    """Return PYTHONPATH for a child that imports this `verl`; the user's own entries come after."""
    paths = [PACKAGE_ROOT]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return os.pathsep.join(paths)


def code_to_run(module: str) -> str:
    """Return a program for `python -c` that calls `main` of a module of this `verl`.

    It comes before another `verl` of the current folder, which `python -m` would find first.
    """
    return f"import sys; sys.path.insert(0, {PACKAGE_ROOT!r}); from {module} import main; main()"


def our_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a child that imports this `verl`: ours, plus the variables."""
    return {**os.environ, "PYTHONPATH": search_path(), **variables}


def start(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start a process in a session of its own. Returns it with our end of a connection to it.

    The connection is its standard input, where it reads and answers. Its prints go to our stderr.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(True)  # also where a user's code has set a default timeout
    try:
        process = subprocess.Popen(
            command,
            stdin=theirs.fileno(),
            stdout=2,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the trainer
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, ours


def take_connection() -> int:
    """Return the descriptor of the connection to the parent; standard input is empty after it.

    Called in the process that `start` has started.
    """
    connection = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return connection


def kill_session(pid: int) -> None:
    """Kill the processes of a session; those that it has started are among them."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def describe_end(exit_code: int | None) -> str:
    """Describe how a process ended, as the rest of a sentence; a negative code is a signal's."""
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    if -exit_code == signal.SIGKILL:
        return "was killed (SIGKILL); the machine may have run out of memory"
    known = {int(number): number.name for number in signal.Signals}
    return f"was ended by the signal {known.get(-exit_code, -exit_code)}"


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
