"""Run functions of users, asynchronous or plain, without blocking the event loop of the caller."""

import asyncio
import inspect
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.agents.tools.threads import run_in_thread
from verl.utils.deadline import call_ends
from verl.utils.errors import VerlError, frame_of, text_or_source
from verl.utils.logging import say_once
from verl.utils.signatures import taken_by
from verl.utils.threads import LoopThread

_UNSTUCK_GRACE_S = 0.25  # a loop that answers later than this after a deadline is abandoned
_SLOW_START_S = 1.0  # a call that waits longer for its loop is worth a line of the log

_Outcome = tuple[Any, BaseException | None]  # the value of a call, or the error that it raised


@dataclass(frozen=True, kw_only=True)
class UserCall:
    """Result of one call: "ok" with its value, "timeout", or "crashed" with a sentence."""

    outcome: str
    value: Any = None
    error: str = ""

    @property
    def facts(self) -> dict[str, str]:
        """The outcome and the error, as a session hands them on."""
        return {"outcome": self.outcome, "error": self.error}


class UserThread:
    """An event loop in a daemon thread of its own.

    Every coroutine of a user runs in the same loop, so clients and locks that belong to a loop
    keep working from call to call. A thread that does not answer after a deadline is interrupted
    and abandoned, and later calls get a new one. Calls read their deadline by
    `verl.utils.deadline.time_left`.

    Args:
        name: of the thread, for stack dumps.
        serial: run plain functions in the thread of the loop, one at a time, for objects that must
            stay in one thread. Otherwise each plain call gets a thread, and they run side by side.
    """

    def __init__(self, name: str, *, serial: bool = False) -> None:
        self.name = name
        self.serial = serial
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None

    async def call(
        self, function: Callable[..., Any], /, *args: Any, timeout_s: float, **kwargs: Any
    ) -> UserCall:
        """Call `function` in the thread and wait for it, at most `timeout_s` seconds.

        A coroutine that is late is cancelled. A plain function that is late is interrupted at its
        next Python instruction, and its result is dropped. If the caller is cancelled, so is the
        call.
        """
        loop, running = self._submit(self._run(function, args, kwargs, time.monotonic(), timeout_s))
        waiting = asyncio.wrap_future(running)
        try:
            await asyncio.wait([waiting], timeout=timeout_s)
        finally:
            in_time = waiting.done()
            waiting.cancel()

        if not in_time:
            await self._abandon_if_stuck(loop)
        return _result(function, waiting, in_time, timeout_s)

    def stop(self) -> None:
        """End the loop. Calls under way are cancelled; a later call starts a new thread."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def _submit(self, work: Coroutine[Any, Any, _Outcome]) -> tuple[LoopThread, "Future[_Outcome]"]:
        """Queue a coroutine in the loop, and start one if there is none."""
        with self._lock:  # so that `stop` cannot close the loop in between
            if self._loop is None:
                self._loop = LoopThread(self.name)
            return self._loop, self._loop.submit(work)

    async def _run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        asked_at: float,
        timeout_s: float,
    ) -> _Outcome:
        """Return the value or the error of a call. Runs in the loop of the thread."""
        current = self._loop
        if current is None or current.loop is not asyncio.get_running_loop():
            raise asyncio.CancelledError  # it waited in a loop that has been given up

        if time.monotonic() - asked_at > _SLOW_START_S:
            say_once(
                f"{self.name}: calls wait for each other, because a coroutine blocks its event "
                "loop. Await inside it, or make it a plain function, which gets a thread of its "
                "own."
            )
        call_ends.set(asked_at + timeout_s)  # of this task alone

        def plain_call() -> Any:
            return function(*args, **kwargs)

        try:
            if self.serial or inspect.iscoroutinefunction(function):
                value = plain_call()
            else:
                value = await run_in_thread(plain_call)
            if inspect.isawaitable(value):
                value = await value
        except asyncio.CancelledError:
            raise
        # SystemExit would end the loop, and with it the calls of other episodes.
        except BaseException as error:  # noqa: BLE001
            return None, error
        return value, None

    async def _abandon_if_stuck(self, loop: LoopThread) -> None:
        """Give up a loop that a blocking call keeps from running, and interrupt the call."""
        if self._loop is not loop or await loop.answers(_UNSTUCK_GRACE_S):
            return
        with self._lock:
            if self._loop is not loop:  # another late call has given it up
                return
            self._loop = None
        loop.abandon()


class UserSession:
    """The calls of one episode on an object of a user, counted by how they end.

    Keywords of a call are fields of a row, which may have any name.

    Args:
        thread: where the calls run.
        timeout_s: deadline of each call, in seconds.
    """

    def __init__(self, thread: UserThread, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.outcomes: Counter[str] = Counter()  # calls by "ok", "timeout", "crashed"
        self.failure: UserCall | None = None  # the first call that failed
        self._thread = thread

    async def _call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> UserCall:
        """Call a method with the keywords that it takes. A failure is counted and logged."""
        effect = "Episodes in which this happens end there."
        return await self._logged(effect, method, *args, **kwargs)

    async def _call_last(self, method: Callable[..., Any], /, **kwargs: Any) -> UserCall:
        """Do as `_call`, for the method that ends an episode: a failure has no effect on it."""
        effect = "These episodes count all the same, but what they hold may not be freed."
        return await self._logged(effect, method, **kwargs)

    async def _logged(
        self, effect: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> UserCall:
        accepted = taken_by(method, kwargs)
        bound = partial(method, *args, **accepted)
        call = await self._thread.call(bound, timeout_s=self.timeout_s)
        self.outcomes[call.outcome] += 1
        if call.outcome != "ok":
            self.failure = self.failure or call
            error = call.error.rstrip(".")
            say_once(f"{error}. {effect}", logging.WARNING)
        return call


def is_finite_number(value: Any) -> bool:
    """Return whether a user's code gave a finite number. A text of digits is none."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        return False
    try:
        return math.isfinite(float(value))
    # An array of several numbers, or a whole number beyond all floats.
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False


def flag_of(value: Any) -> bool | None:
    """Return the truth value that a user's code gave, also one of an array or a tensor.

    None for anything else: the text "False" and a score in the wrong place would count as true.
    """
    if isinstance(value, bool):
        return value
    is_flag = str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    if not is_flag or math.prod(value.shape) != 1:
        return None
    return bool(value)


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name as messages show it, with its class."""
    function = _users_function(function)
    return getattr(function, "__qualname__", type(function).__name__)


def _result(
    function: Callable[..., Any],
    waiting: "asyncio.Future[_Outcome]",
    in_time: bool,
    timeout_s: float,
) -> UserCall:
    called = name_of(function)
    if not in_time:
        error = f"{called} did not answer within {timeout_s:g} s."
        return UserCall(outcome="timeout", error=error)
    if waiting.cancelled():
        error = f"{called} was cancelled by its own code."
        return UserCall(outcome="crashed", error=error)

    value, raised = waiting.result()
    if raised is None:
        return UserCall(outcome="ok", value=value)
    file = file_of(function)
    error = f"{called} raised {described_error(raised, file)}"
    if isinstance(raised, VerlError):  # a sentence of this package, which more may follow
        by_adapter = frame_of(raised, file) is None
        error = str(raised) if by_adapter else f"{error}."
    return UserCall(outcome="crashed", error=error)


def file_of(function: Callable[..., Any]) -> str | None:
    """Return the file of a function's code."""
    code = getattr(inspect.unwrap(_users_function(function)), "__code__", None)
    return getattr(code, "co_filename", None)


def _users_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that messages name: that behind a `partial`, and behind an adapter.

    An adapter of this package has `users_method`, which gives the user's method by the name of its
    own.
    """
    while isinstance(function, partial):
        function = function.func

    adapter = getattr(function, "__self__", None)
    users_method = getattr(adapter, "users_method", None)
    if users_method is None or not function.__module__.startswith("verl."):
        return function
    return users_method(function.__name__) or function


def described_error(error: BaseException, file: str | None) -> str:
    """Return an error of a user's code in `file` with its place: "KeyError (loop.py:3): 'a'"."""
    frame = frame_of(error, file)
    place = "" if frame is None else f" ({frame.filename}:{frame.lineno})"
    return f"{type(error).__name__}{place}: {text_or_source(error, frame)}"
