"""Helper processes: a child answers each JSON line by one, and can be killed when it is late.

They run code that must not run in the trainer: code that uses signals or may not end (MATH), code
that may hang (functions of the manager prime), untrusted code (the sandbox). A child is a fresh
process, never a fork of the trainer, because threads and CUDA contexts do not survive a fork.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from verl.utils.children import (
    START_TIMEOUT_S,
    code_to_run,
    describe_end,
    kill_session,
    our_environment,
    start,
)
from verl.utils.deadline import seconds_until
from verl.utils.errors import RewardError
from verl.utils.garbage import finalize

# Pause before the next of several answers is read, so that each one does not wake this process.
GATHER_S = 0.0005


class HelperTimeout(Exception):
    """The child did not answer in time and was killed."""


class HelperDied(Exception):
    """The child exited instead of answering; `exit_code` is negative for a signal."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"the process {describe_end(exit_code)}")
        self.exit_code = exit_code


class Helper:
    """One child process.

    Args:
        command: started by `verl.utils.children.start`. Its first line becomes `greeting`.
        first: a message to send before the greeting; None sends nothing.

    Raises:
        RewardError: no greeting came; the child's own messages are on stderr.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        name: str,
        first: Any = None,
    ) -> None:
        try:
            self._process, self._connection = start(command, environment)
        except OSError as error:
            raise RewardError(
                f"No process could be started for {name}: {error}. Raise the limit on processes "
                "and memory (ulimit -u, the container's pids limit), or end others."
            ) from error

        self._owner = os.getpid()
        self._unread = bytearray()
        try:
            with self._closing(START_TIMEOUT_S):
                if first is not None:
                    self._write(first)
                self.greeting = self._read(time.monotonic() + START_TIMEOUT_S)
        except (HelperTimeout, HelperDied) as error:
            raise RewardError(
                f"The helper process of {name} did not start ({error}). Its own messages are on "
                "stderr."
            ) from error

    @property
    def is_ours(self) -> bool:
        """Return whether it runs and belongs to this process; a fork does not own it."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, message: Any, timeout_s: float) -> Any:
        """Return the answer. After HelperTimeout or HelperDied the helper is closed."""
        ends = time.monotonic() + timeout_s
        with self._closing(timeout_s):
            self._write(message)
            return self._read(ends)

    def ask_each(self, message: Any, timeout_s: float, numbers: Sequence[int]) -> Iterator[Any]:
        """Yield the answers to one message with several requests, in the order of the requests.

        Each answer may take `timeout_s`, counted from the previous answer. HelperTimeout or
        HelperDied is raised in place of the first missing answer, after which the helper is closed.

        Args:
            numbers: the first entry of each answer, which is a list. Other lines are skipped, such
                as the answer of a process that the child forked.
        """
        with self._closing(timeout_s):
            self._write(message)
            for position, number in enumerate(numbers):
                if position > 0 and b"\n" not in self._unread:
                    time.sleep(GATHER_S)
                yield self._read_numbered(number, time.monotonic() + timeout_s)

    def close(self) -> None:
        """Kill the child and all processes of its session. Does nothing in a fork of the owner."""
        if self._owner != os.getpid():
            return
        self.kill()
        self._process.wait()
        self._connection.close()

    def kill(self) -> None:
        """Kill as `close` does, from any thread; a caller that waits gets HelperDied."""
        if self._owner == os.getpid():
            kill_session(self._process.pid)

    @contextmanager
    def _closing(self, timeout_s: float) -> Iterator[None]:
        """Close the helper if it is late or dies, and raise HelperTimeout or HelperDied."""
        try:
            yield
        except TimeoutError:
            self.close()
            raise HelperTimeout(f"no answer within {timeout_s:g} s") from None
        except ConnectionError:
            exit_code = self._process.wait()
            self.close()
            raise HelperDied(exit_code) from None

    def _write(self, message: Any) -> None:
        self._connection.settimeout(START_TIMEOUT_S)  # a large message, on a busy machine
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _read_numbered(self, number: int, ends: float) -> list[Any]:
        while True:
            with suppress(ValueError):  # a line that is not JSON
                answer = self._read(ends)
                if isinstance(answer, list) and answer[:1] == [number]:
                    return answer

    def _read(self, ends: float) -> Any:
        """Return one line as JSON. Raises TimeoutError or ConnectionError if none comes."""
        seen = 0  # there is no end of a line before this position
        while (end := self._unread.find(b"\n", seen)) < 0:
            seen = len(self._unread)
            self._connection.settimeout(seconds_until(ends))
            chunk = self._connection.recv(1 << 20)
            if not chunk:
                raise ConnectionResetError
            self._unread += chunk

        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return json.loads(line)


def start_module(module: str, *, name: str, first: Any = None, **environment: str) -> Helper:
    """Start a helper that runs a module of ours, in our environment plus the given variables."""
    command = [sys.executable, "-c", code_to_run(module)]
    return Helper(command, our_environment(**environment), name=name, first=first)


class HelperPool:
    """Helpers that wait for work, one for each concurrent caller. They end with this process."""

    def __init__(self, start: Callable[[], Helper]) -> None:
        self._start = start
        self._idle: deque[Helper] = deque()
        self._at_work: set[Helper] = set()
        finalize(self, _end, self._idle, self._at_work)

    def ask(self, message: Any, timeout_s: float) -> Any:
        """Return the answer of an idle helper; see `Helper.ask`.

        After HelperTimeout or HelperDied the next call gets another helper.
        """
        with self._lent() as helper:
            return helper.ask(message, timeout_s)

    def ask_each(self, message: Any, timeout_s: float, numbers: Sequence[int]) -> Iterator[Any]:
        """Yield the answers of one helper; see `Helper.ask_each` and `ask`."""
        with self._lent() as helper:
            yield from helper.ask_each(message, timeout_s, numbers)

    def start(self) -> Any:
        """Ensure that one helper waits for work, and return its greeting."""
        helper = self._borrow()
        self._idle.append(helper)
        return helper.greeting

    def close(self) -> None:
        """End the idle helpers. A working one ends with this process."""
        _close_all(self._idle)

    @contextmanager
    def _lent(self) -> Iterator[Helper]:
        """Lend a helper. It is idle again after the block, unless that raised."""
        helper = self._borrow()
        self._at_work.add(helper)
        try:
            yield helper
            self._idle.append(helper)
        except GeneratorExit:  # the caller stopped early, and unread answers are still to come
            helper.close()
            raise
        finally:
            self._at_work.discard(helper)

    def _borrow(self) -> Helper:
        for helper in _taken(self._idle):
            if helper.is_ours:
                return helper
            helper.close()
        return self._start()


def _close_all(helpers: deque[Helper]) -> None:
    for helper in _taken(helpers):
        helper.close()


def _end(idle: deque[Helper], at_work: set[Helper]) -> None:
    _close_all(idle)
    for helper in list(at_work):  # a call may hang forever
        helper.kill()


def _taken(helpers: deque[Helper]) -> Iterator[Helper]:
    """Take all helpers out of the queue, one by one; other threads may take some as well."""
    while True:
        try:
            yield helpers.pop()
        except IndexError:
            return
