"""Helper processes: a child answers each JSON line by one, and can be killed when it is late.

They run code that must not run in the trainer: code that uses signals or may not end (MATH), code
that may hang (functions of the manager prime), untrusted code (the sandbox). A child is a fresh
process, never a fork of the trainer, because threads and CUDA contexts do not survive a fork.
"""

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from verl.utils.children import search_path
from verl.utils.errors import RewardError

START_TIMEOUT_S = 120.0  # imports on a busy machine
# Pause before the next of several answers is read, so that each one does not wake this process.
GATHER_S = 0.0005


class HelperTimeout(Exception):
    """The child did not answer in time and was killed."""


class HelperDied(Exception):
    """The child exited instead of answering; `exit_code` is negative for a signal."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"the process ended with exit code {exit_code}")
        self.exit_code = exit_code


class Helper:
    """One child process.

    Args:
        command: the command to start. Its first line of output becomes `greeting`.
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
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=dict(environment),
                encoding="utf-8",
                errors="backslashreplace",
                # Ctrl-C is for the trainer; the child ends when its pipe closes
                start_new_session=True,
            )
        except OSError as error:
            raise RewardError(
                f"No process could be started for {name}: {error}. Raise the limit on processes "
                "and memory (ulimit -u, the container's pids limit), or end others."
            ) from error

        self._owner = os.getpid()
        self._unread = bytearray()
        try:
            if first is not None:
                self._write(first)
            self.greeting = self._read(START_TIMEOUT_S)
        except (HelperTimeout, HelperDied) as error:
            self.close()
            raise RewardError(
                f"The helper process of {name} did not start ({error}). Its own messages are on "
                "stderr."
            ) from error

    @property
    def is_ours(self) -> bool:
        """Return whether it runs and belongs to this process; a fork does not own the pipes."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, message: Any, timeout_s: float) -> Any:
        """Return the answer. After HelperTimeout or HelperDied the helper is closed."""
        ends = time.monotonic() + timeout_s
        with self._closing(timeout_s):
            self._write(message)
            return self._read(ends - time.monotonic())

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
                yield self._read_numbered(timeout_s, number)

    @contextmanager
    def _closing(self, timeout_s: float) -> Iterator[None]:
        """Close the helper if it is late or dies."""
        try:
            yield
        except HelperTimeout:
            self.close()
            raise HelperTimeout(f"no answer within {timeout_s:g} s") from None
        except HelperDied:
            self.close()
            raise

    def _read_numbered(self, timeout_s: float, number: int) -> list[Any]:
        ends = time.monotonic() + timeout_s
        while True:
            answer = self._read(ends - time.monotonic(), skips_junk=True)
            if isinstance(answer, list) and answer[:1] == [number]:
                return answer

    def close(self) -> None:
        """Kill the child and all processes of its session. Does nothing in a fork of the owner."""
        if self._owner != os.getpid():
            return
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # unsent data, which has no reader any more

    def kill(self) -> None:
        """Kill as `close` does, from any thread; a caller that waits gets HelperDied."""
        if self._owner != os.getpid():
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._process.kill()

    def _write(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise HelperDied(self._process.wait()) from None

    def _read(self, timeout_s: float, skips_junk: bool = False) -> Any:
        """Return one line as JSON; with `skips_junk`, None for a line that is not JSON."""
        line = self._read_line(timeout_s)
        try:
            return json.loads(line)
        except ValueError:
            if skips_junk:
                return None
            raise

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        ends = time.monotonic() + timeout_s
        start = 0  # there is no end of a line before this position
        while (end := self._unread.find(b"\n", start)) < 0:
            start = len(self._unread)
            left_ms = (ends - time.monotonic()) * 1000
            poll = select.poll()
            poll.register(self._process.stdout, select.POLLIN)
            timeout_ms = None if math.isinf(left_ms) else max(math.ceil(left_ms), 0)
            ready = poll.poll(timeout_ms)
            if not ready:
                # Kill the whole session, or a process that it forked would continue.
                self.kill()
                raise HelperTimeout(f"no answer within {timeout_s:g} s")
            chunk = os.read(self._process.stdout.fileno(), 1 << 20)
            if not chunk:
                raise HelperDied(self._process.wait())
            self._unread += chunk

        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return line


def start_module(module: str, *, name: str, first: Any = None, **environment: str) -> Helper:
    """Start a helper that runs a module of ours, in our environment plus the given variables."""
    variables = {**os.environ, "PYTHONPATH": search_path(), **environment}
    return Helper([sys.executable, "-m", module], variables, name=name, first=first)


class HelperPool:
    """Helpers that wait for work, one for each concurrent caller. They end with this process."""

    def __init__(self, start: Callable[[], Helper]) -> None:
        self._start = start
        self._idle: deque[Helper] = deque()
        self._at_work: set[Helper] = set()
        weakref.finalize(self, _end, self._idle, self._at_work)  # at exit too

    def ask(self, message: Any, timeout_s: float) -> Any:
        """Return the answer of an idle helper; see `Helper.ask`.

        After HelperTimeout or HelperDied the next call gets another helper.
        """
        helper = self._borrow()
        self._at_work.add(helper)
        try:
            answer = helper.ask(message, timeout_s)
        finally:
            self._at_work.discard(helper)
        self._idle.append(helper)
        return answer

    def ask_each(self, message: Any, timeout_s: float, numbers: Sequence[int]) -> Iterator[Any]:
        """Yield the answers of one helper; see `Helper.ask_each` and `ask`."""
        helper = self._borrow()
        self._at_work.add(helper)
        try:
            yield from helper.ask_each(message, timeout_s, numbers)
            self._idle.append(helper)
        except GeneratorExit:  # the caller stopped early, and unread answers are still to come
            helper.close()
            raise
        finally:
            self._at_work.discard(helper)

    def start(self) -> Any:
        """Ensure that one helper waits for work, and return its greeting."""
        helper = self._borrow()
        self._idle.append(helper)
        return helper.greeting

    def close(self) -> None:
        """End the idle helpers. A working one ends with this process."""
        _close_all(self._idle)

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
