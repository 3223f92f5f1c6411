"""A process that forks helper processes, so that a replacement is there within milliseconds.

It has imported all that a helper needs, runs no thread and no code of users, so its forks are safe;
those of the trainer would not be. It answers requests on its socket, one byte each and a number:

    s + a socket    fork a helper that serves this connection     -> its process id
    r, process id   take note of the end of a helper              -> its exit code

A helper's process id stays reserved until it is released, so that no other process is killed in its
place.
"""

import contextlib
import gc
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from verl.utils.children import (
    START_TIMEOUT_S,
    code_to_run,
    kill_session,
    our_environment,
    start,
)

_REQUEST = struct.Struct(">cq")
_ANSWER = struct.Struct(">q")


class NurseryError(RuntimeError):
    """No helper was started."""


class NurseryLostError(NurseryError):
    """The nursery ended, or did not answer. Another one may work."""


class Child:
    """A helper process. `exit_code` is None until `kill`, and negative for a signal."""

    def __init__(self, nursery: "Nursery", pid: int) -> None:
        self.pid = pid
        self.exit_code: int | None = None
        self._nursery = nursery

    def kill(self) -> None:
        """Kill the process with all that it has started in its session, and wait for its end."""
        if self.exit_code is None:
            kill_helper(self.pid)
            self.exit_code = self._nursery.release(self.pid)


class Nursery:
    """The trainer's end of the process. Used from one thread."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", code_to_run("verl.agents.tools.process_main")]
        self.process, self._control = start(command, our_environment())
        self._control.settimeout(START_TIMEOUT_S)

    def fork(self, connection: socket.socket) -> Child:
        """Start a helper that serves a connection.

        Raises:
            NurseryLostError: the process has ended.
            NurseryError: the machine allows no more processes.
        """
        pid = self._ask(b"s", 0, connection)
        if pid <= 0:
            raise NurseryError(f"no process can be started: {os.strerror(-pid)}")
        return Child(self, pid)

    def release(self, pid: int) -> int:
        """Return the exit code of a helper that was killed; -9 where the nursery has ended."""
        try:
            return self._ask(b"r", pid)
        except NurseryLostError:
            return -signal.SIGKILL

    def close(self) -> None:
        """End the process. Helpers end with their connections."""
        self._control.close()
        self.process.kill()
        self.process.wait()

    def _ask(self, request: bytes, number: int, connection: socket.socket | None = None) -> int:
        files = [] if connection is None else [connection.fileno()]
        try:
            socket.send_fds(self._control, [_REQUEST.pack(request, number)], files)
            answer = self._control.recv(_ANSWER.size, socket.MSG_WAITALL)
        except OSError as error:
            raise NurseryLostError(f"the process that starts helpers failed: {error}") from error
        if len(answer) < _ANSWER.size:
            raise NurseryLostError("the process that starts helpers has ended")
        return _ANSWER.unpack(answer)[0]


def kill_helper(pid: int) -> None:
    """Kill a process and all that it has started in its session."""
    kill_session(pid)
    with contextlib.suppress(ProcessLookupError):  # it may not have its own session yet
        os.kill(pid, signal.SIGKILL)


def serve(control: socket.socket, child_main: Callable[[socket.socket], Any]) -> None:
    """Answer requests until the trainer's end is closed. Runs in the nursery.

    Args:
        child_main: called in each fork with its connection.
    """
    gc.freeze()  # so that helpers share the memory of modules
    while True:
        data, files, _, _ = socket.recv_fds(control, _REQUEST.size, 1)
        if len(data) < _REQUEST.size:
            return
        request, number = _REQUEST.unpack(data)
        if request == b"s":
            answer = _fork(control, files[0], child_main)
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        control.sendall(_ANSWER.pack(answer))


def _fork(control: socket.socket, file: int, child_main: Callable[[socket.socket], Any]) -> int:
    """Return the process id of a new helper, or a negative error number."""
    try:
        pid = os.fork()
    except OSError as error:
        os.close(file)
        return -(error.errno or 1)
    if pid > 0:
        os.close(file)
        return pid

    status = 1
    try:
        control.close()
        os.setsid()
        child_main(socket.socket(fileno=file))
        status = 0
    finally:
        os._exit(status)
