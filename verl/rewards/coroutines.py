"""Call a coroutine function for the samples of a batch, all at once in an event loop."""

import asyncio
import concurrent.futures
import math
import threading
import time

from verl.rewards.outcome import Arguments, Outcome, Outcomes, RewardFunction
from verl.rewards.watch import THREAD_NAME, LockWatch
from verl.utils.deadline import call_ends
from verl.utils.errors import RewardError
from verl.utils.threads import LoopThread

# How long cancelled coroutines may take to clean up.
CANCEL_GRACE_S = 1.0


class Coroutines:
    """The calls of one batch, all at once in an event loop.

    `moved` is the time at which the loop last made progress.
    """

    def __init__(self, function: RewardFunction, timeout_s: float, loop: LoopThread) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self.outcomes: Outcomes = []
        self.abandoned: list[threading.Thread] = []  # the loop's thread, if a coroutine blocks it
        self.moved = time.monotonic()
        self._loop = loop
        self._calls: list[concurrent.futures.Future[None]] = []
        self._is_over = False
        self._watch = LockWatch(timeout_s + CANCEL_GRACE_S)
        loop.submit(self._beat())

    def add(self, row: int, arguments: Arguments) -> int:
        """Add a call, and return the index of its outcome."""
        self._watch.start()
        self.outcomes.append(None)
        index = len(self.outcomes) - 1
        self._calls.append(self._loop.submit(self._call(index, arguments)))
        return index

    def run(self) -> None:
        """Wait until every added sample has an outcome; abandon a loop that a coroutine blocks."""
        poll_s = 0.05 if self.timeout_s < 1 else 0.5
        while concurrent.futures.wait(self._calls, timeout=poll_s).not_done:
            # A coroutine that blocks without awaiting stops the loop and its deadlines.
            if time.monotonic() - self.moved > self.timeout_s + CANCEL_GRACE_S:
                self.abandoned = [self._loop.thread]
                break
        else:
            for call in self._calls:
                call.result()

        self.outcomes = [outcome or Outcome(timed_out=True) for outcome in self.outcomes]
        if self.abandoned:
            # The others must not block the loop again, nor have the outcome of a cancelled call.
            self.drop()
            self._loop.abandon()

    def drop(self) -> None:
        """Start no further call, even if samples are added."""
        self._is_over = True
        self._watch.stop()

    async def _call(self, index: int, arguments: Arguments) -> None:
        task = asyncio.ensure_future(self._note(index, arguments))
        timeout_s = self.timeout_s if math.isfinite(self.timeout_s) else None
        await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            self.outcomes[index] = Outcome(timed_out=True)
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_GRACE_S)

    async def _note(self, index: int, arguments: Arguments) -> None:
        if self._is_over:
            return
        call_ends.set(time.monotonic() + self.timeout_s)
        try:
            outcome = Outcome(value=await self.function(**arguments()))
        except asyncio.CancelledError:  # by the user's code, or by us because it was late
            outcome = Outcome(error=RuntimeError("the coroutine was cancelled"))
        except BaseException as error:  # noqa: BLE001  (a user's code, as in `_call`)
            outcome = Outcome(error=error)
        self.outcomes[index] = self.outcomes[index] or outcome

    async def _beat(self) -> None:
        while not self._is_over:
            self.moved = time.monotonic()
            await asyncio.sleep(0.02)


def start_loop() -> LoopThread:
    """Start an event loop in a daemon thread.

    It lives as long as its caller, so that the function can keep clients that are bound to it.
    """
    try:
        return LoopThread(f"{THREAD_NAME}-loop")
    except RuntimeError as error:
        raise RewardError(
            f"No thread could be started to call the reward function ({error}). Raise the limit on "
            "processes (ulimit -u, the container's pids limit)."
        ) from error
