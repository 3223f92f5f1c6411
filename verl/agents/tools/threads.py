"""Calls in daemon threads, and event loops in threads of their own that may be blocked.

A thread cannot be ended from outside. One that is late gets an exception at its next Python
instruction (`interrupt`); until then it counts as left behind.
"""

import asyncio
import concurrent.futures
import contextvars
import functools
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from verl.utils.threads import LateCall, LoopThread, interrupt

T = TypeVar("T")
THREAD_NAME = "verl-tool"
# How long a loop may take for one step before new calls go to another one.
BLOCKED_S = 0.5
ANSWER_S = 0.05
INTERRUPT_AGAIN_S = 1.0

_left_behind: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()


def count_left_behind() -> int:
    """Return how many threads still run a call that was given up."""
    return sum(1 for thread in list(_left_behind) if thread.is_alive())


def leave_behind(thread: threading.Thread) -> None:
    """Give up a thread and interrupt it."""
    if thread.is_alive():  # identifiers of ended threads are used again
        _left_behind.add(thread)
        interrupt(thread)


async def run_in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function that may block, in a daemon thread, and return or raise as it does.

    When the waiting task is cancelled, the thread is interrupted and left behind. Context variables
    reach the thread.

    Raises:
        RuntimeError: no thread can be started.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
    target = functools.partial(_call_and_deliver, call, loop, outcome)
    thread = threading.Thread(target=target, name=THREAD_NAME, daemon=True)
    thread.start()
    try:
        return await outcome
    except asyncio.CancelledError:
        if not outcome.done() or outcome.cancelled():
            leave_behind(thread)
        raise


def _call_and_deliver(
    call: Callable[[], Any], loop: asyncio.AbstractEventLoop, outcome: "asyncio.Future[Any]"
) -> None:
    """Run in the thread: make the call, then hand its outcome to the loop."""
    try:
        value: Any = None
        raised: BaseException | None = None
        try:
            value = call()
        except LateCall:
            return
        except BaseException as error:  # noqa: BLE001  (the task that waits raises it)
            raised = error
        loop.call_soon_threadsafe(_settle, outcome, value, raised)
    except (LateCall, RuntimeError):
        return  # given up at this very moment, or the loop has been closed


def _settle(outcome: "asyncio.Future[Any]", value: Any, raised: BaseException | None) -> None:
    if outcome.done():
        return
    if raised is None:
        outcome.set_result(value)
    elif isinstance(raised, (StopIteration, asyncio.CancelledError)):
        # Futures refuse the first, and take the second for a cancellation of the waiting task.
        outcome.set_exception(RuntimeError(f"the call raised {type(raised).__name__}"))
    else:
        outcome.set_exception(raised)


async def gather_all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side, and return their results in this order.

    When one raises, or the waiting task is cancelled, the others are cancelled and waited for.
    """
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_to_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and return or raise as it does.

    It gets a thread where this one has a running loop, as in a notebook.
    """
    if not _has_running_loop():
        return asyncio.run(coroutine)

    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            answer.set_result(asyncio.run(coroutine))
        except BaseException as error:  # noqa: BLE001  (raised again by `result`)
            answer.set_exception(error)

    threading.Thread(target=run, name="verl-agents", daemon=True).start()
    return answer.result()


def _has_running_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class WatchedLoop(LoopThread):
    """A loop for coroutines that may block it.

    `check` must be called every now and then while calls are under way: it finds out whether the
    loop answers, and interrupts a task that blocks it beyond its deadline.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._ends: weakref.WeakKeyDictionary[asyncio.Task[Any], float]
        self._ends = weakref.WeakKeyDictionary()
        self._asked_at: float | None = None  # of a question that the loop has not answered yet
        self._interrupted_at = float("-inf")

    def start(
        self, coroutine: Coroutine[Any, Any, T], ends: float
    ) -> "concurrent.futures.Future[T]":
        """Start a coroutine with a deadline by `time.monotonic`."""
        return self.submit(self._with_deadline(coroutine, ends))

    @property
    def is_blocked(self) -> bool:
        """Whether one step takes longer than BLOCKED_S, or the loop has ended."""
        if self._ended:
            return True
        asked_at = self._asked_at
        return asked_at is not None and time.monotonic() - asked_at > BLOCKED_S

    def close(self) -> None:
        """End the loop, and interrupt a task that blocks it: its thread would compute for ever."""
        blocked = self.is_blocked and not self._ended
        super().close()
        if blocked:
            leave_behind(self.thread)

    def check(self) -> None:
        """Ask the loop for a sign of life, and interrupt a late task that blocks it."""
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            if not self._ended:
                self.loop.call_soon_threadsafe(self._answer)
        elif self.is_blocked and now - self._interrupted_at > INTERRUPT_AGAIN_S:
            running = asyncio.current_task(self.loop)
            if running is not None and now > self._ends.get(running, float("inf")):
                self._interrupted_at = now
                interrupt(self.thread)

    async def doubt(self) -> None:
        """Ask the loop after a call was late there. No answer within ANSWER_S: it is blocked."""
        if self._ended:
            return
        if await self.answers(ANSWER_S):
            return
        self._asked_at = float("-inf")
        self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._asked_at = None

    async def _with_deadline(self, coroutine: Coroutine[Any, Any, T], ends: float) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._ends[task] = ends
        return await coroutine
