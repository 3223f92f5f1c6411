"""Helper processes: a child that answers one JSON line for each JSON line, and can be killed when
it is late.

For what must not run in the trainer: code that takes signals or for ever (MATH), code that may hang
(the prime manager's functions), code that nobody has read (the sandbox). A child is started from
nothing, never forked from the trainer, whose threads and CUDA context no fork survives.
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.utils.errors import RewardError

START_TIMEOUT_S = 120.0  # imports on a busy machine
# The folder that a child must have in its search path to find the same `verl`, however we were
# started.
PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


class HelperTimeout(Exception):
    """No answer in time. The child was killed."""


class HelperDied(Exception):
    """The child ended instead of answering; `exit_code` is negative for a signal."""

    def __init__(self, exit_code: int | None) -> None:
        super().__init__(f"the process ended with exit code {exit_code}")
        self.exit_code = exit_code


class Helper:
    """One child process.

    Args:
        command: what to start. Its first line is its greeting, which `greeting` holds.
        first: sent before the greeting is waited for, unless None.

    Raises:
        RewardError: no greeting; what the child had to say about it stands on stderr.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        name: str,
        first: Any = None,
    ) -> None:
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
        self._owner = os.getpid()
        self._timed_out = False
        try:
            if first is not None:
                self._write(first)
            self.greeting = self._read(START_TIMEOUT_S)
        except (HelperTimeout, HelperDied) as error:
            self.close()
            raise RewardError(
                f"The helper process of {name} did not start ({error}); its own words stand on "
                "stderr."
            ) from error

    @property
    def is_ours(self) -> bool:
        """Whether it lives, and belongs to this process: after a fork the pipes are the
        parent's."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, message: Any, timeout_s: float) -> Any:
        """The answer. After HelperTimeout or HelperDied the helper is closed."""
        try:
            self._write(message)
            return self._read(timeout_s)
        except (HelperTimeout, HelperDied):
            self.close()
            raise

    def close(self) -> None:
        """Kill the child and what it has started in its own session; nothing in a fork of its
        owner."""
        if self._owner != os.getpid():
            return
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # an unsent rest, which nobody is there to read

    def kill(self) -> None:
        """As `close`, from any thread: who waits for an answer gets HelperDied."""
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

    def _read(self, timeout_s: float) -> Any:
        """One answer. Killing the child is what ends the read: no pipe can be waited for with a
        deadline on Windows."""
        assert self._process.stdout is not None
        alarm = threading.Timer(min(timeout_s, threading.TIMEOUT_MAX), self._expire)
        alarm.daemon = True
        if math.isfinite(timeout_s):
            alarm.start()
        try:
            line = self._process.stdout.readline()
        finally:
            alarm.cancel()
        if line.endswith("\n"):
            return json.loads(line)
        if self._timed_out:
            raise HelperTimeout(f"no answer within {timeout_s:g} s")
        raise HelperDied(self._process.wait())

    def _expire(self) -> None:
        self._timed_out = True
        # all of its session: whoever else has the pipe open would keep the read from ending
        self.kill()


def start_module(module: str, *, name: str, first: Any = None, **environment: str) -> Helper:
    """A helper that runs a module of ours in our environment, but for the variables given."""
    paths = os.pathsep.join([PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": paths, **environment}
    return Helper([sys.executable, "-m", module], variables, name=name, first=first)


class HelperPool:
    """Helpers that wait for work; as many as there were callers at one time. They end with this
    process."""

    def __init__(self, start: Callable[[], Helper]) -> None:
        self._start = start
        self._idle: deque[Helper] = deque()
        self._at_work: set[Helper] = set()
        weakref.finalize(self, _end, self._idle, self._at_work)  # at exit too

    def ask(self, message: Any, timeout_s: float) -> Any:
        """The answer of a helper that has nothing else to do. HelperTimeout, HelperDied: the next
        call has another."""
        helper = self._borrow()
        self._at_work.add(helper)
        try:
            answer = helper.ask(message, timeout_s)
        finally:
            self._at_work.discard(helper)
        self._idle.append(helper)
        return answer

    def close(self) -> None:
        """Idle helpers end here; one at work ends with our process."""
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
    for helper in list(at_work):  # a call may hang for ever
        helper.kill()


def _taken(helpers: deque[Helper]) -> Iterator[Helper]:
    """All that wait there, one after the other; other threads take some too."""
    while True:
        try:
            yield helpers.pop()
        except IndexError:
            return
