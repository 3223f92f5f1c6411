"""Call a plain reward function for the samples of a batch, in threads that wait for work.

Python cannot stop a running call: a late one is abandoned in its daemon thread. A thread may also
hand its calls to a process.
"""

import contextvars
import math
import threading
import time
from collections import deque
from typing import Any

import torch

from verl.rewards.helper import HelperTimeout
from verl.rewards.origin import runs_here
from verl.rewards.outcome import Arguments, Outcome, Outcomes, RewardFunction
from verl.rewards.processes import ProcessFunction, pack_call
from verl.rewards.watch import THREAD_NAME, LockWatch
from verl.utils.deadline import call_ends
from verl.utils.errors import RewardError
from verl.utils.threads import LateCall, interrupt

# Threads that one batch may use once calls hang; before the first time-out it uses one.
MAX_THREADS = 32
# Limits on the calls that a process gets in one message: their number, duration and size.
MAX_CHUNK = 128
CHUNK_S = 0.02
CHUNK_CHARACTERS = 1 << 20


class Threads:
    """The calls of one batch in threads, each of which takes the next sample.

    Threads wait for more samples until `run`, which watches the deadlines. With `stop_at_failure`,
    no call starts for a row after a failed one, so the first failure by row is known.
    """

    def __init__(
        self,
        function: RewardFunction,
        timeout_s: float,
        stop_at_failure: bool,
        at_once: int,
    ) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self.stop_at_failure = stop_at_failure
        self.at_once = at_once
        self.outcomes: Outcomes = []
        self.abandoned: list[threading.Thread] = []
        self._calls: list[tuple[int, Arguments]] = []  # with their rows
        self._waiting: deque[int] = deque()  # places in _calls

        self._is_whole = False
        self._failed_row = math.inf
        # {thread: (its calls, the time at which it began them)}
        self._running: dict[threading.Thread, tuple[list[int], float]] = {}
        self._changed = threading.Condition()
        self._watch = LockWatch(timeout_s if runs_here(function) else math.inf)
        self._start_fault: Exception | None = None
        self._context = contextvars.copy_context()

        # The current device is a property of a thread; a function that calls a model needs the
        # device of its rank.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def add(self, row: int, arguments: Arguments) -> int:
        """Add a call, and return the index of its outcome."""
        self._watch.start()
        with self._changed:
            self._waiting.append(len(self._calls))
            self._calls.append((row, arguments))
            self.outcomes.append(None)
            self._changed.notify()
            if len(self._running) < self.at_once:
                self._start_threads(1)
            return len(self._calls) - 1

    def run(self) -> None:
        """Wait until every added sample has an outcome, or none needs one after a failure.

        Raises RewardError if no thread could be started.
        """
        with self._changed:
            self._is_whole = True
            self._changed.notify_all()
            while not self._is_done():
                self._require_a_thread()
                self._changed.wait(self._until_next_deadline())
                self._abandon_late_threads()

    def drop(self) -> None:
        """Start no further call, even if samples are added."""
        with self._changed:
            self._is_whole = True
            self._failed_row = -math.inf
            self._changed.notify_all()
        self._watch.stop()

    def _start_threads(self, count: int) -> None:
        for _ in range(count):
            context = self._context.copy()
            thread = threading.Thread(
                target=context.run, args=(self._work_until_late,), name=THREAD_NAME, daemon=True
            )
            # Counted from now on, so that a thread that cannot start a call also becomes late.
            self._running[thread] = ([], time.monotonic())
            try:
                thread.start()
            except RuntimeError as error:  # no more threads; the running ones continue
                del self._running[thread]
                self._start_fault = error
                return

    def _require_a_thread(self) -> None:
        """Raise RewardError if calls wait and no thread could be started for them."""
        if self._running or not self._has_next():
            return
        self._start_threads(1)
        if not self._running:
            raise RewardError(
                f"No thread could be started to call the reward function ({self._start_fault}), "
                f"and {threading.active_count()} threads run. Raise the limit on processes "
                "(ulimit -u, the container's pids limit), or give the function a time limit of its "
                "own, so that no call has to be abandoned."
            )

    def _work_until_late(self) -> None:
        try:
            self._work()
        except LateCall:
            # The exception may arrive between taking the lock and entering the block that frees it.
            while self._changed._is_owned():  # pyright: ignore[reportAttributeAccessIssue]
                self._changed.release()

    def _work(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        me = threading.current_thread()
        indexes: list[int] = []
        outcomes: list[Outcome] = []
        began = math.inf

        while True:
            with self._changed:
                if me not in self._running:
                    return  # this thread was late, and its sample has an outcome already
                self._running[me] = ([], math.inf)
                self._end_calls(indexes, outcomes, began)
                self._changed.wait_for(lambda: self._has_next() or self._is_whole)
                if not self._has_next():
                    del self._running[me]
                    return

                indexes = self._take()
                began = time.monotonic()
                self._running[me] = (indexes, began)

            call_ends.set(began + self.timeout_s)
            outcomes = self._call(indexes)
            # Late calls that end before `run` checks the deadlines time out here.
            if time.monotonic() - began >= self.timeout_s:
                outcomes = [Outcome(timed_out=True)]

    def _take(self) -> list[int]:
        """Take calls for this thread, one at least."""
        return [self._waiting.popleft()]

    def _call(self, indexes: list[int]) -> list[Outcome]:
        """Return the outcomes of the first of these calls, of one at least."""
        return [_call_in_thread(self.function, self._calls[indexes[0]][1])]

    def _end_calls(self, indexes: list[int], outcomes: list[Outcome], began: float) -> None:
        """Record the outcomes of calls that began at that time."""
        for index, outcome in zip(indexes, outcomes):
            self._record(index, outcome)

    def _record(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        if self.stop_at_failure and outcome.failed:
            self._failed_row = min(self._failed_row, self._calls[index][0])
        if self._is_whole and self._is_done():
            self._changed.notify_all()

    def _has_next(self) -> bool:
        while self._waiting and self._calls[self._waiting[0]][0] > self._failed_row:
            self._waiting.popleft()
        return bool(self._waiting)

    def _is_done(self) -> bool:
        if self._has_next():
            return False
        for indexes, _ in self._running.values():
            if any(self._calls[index][0] < self._failed_row for index in indexes):
                return False
        return True

    def _until_next_deadline(self) -> float:
        now = time.monotonic()
        # A thread without a call may take one as soon as the lock is free. That call becomes late
        # `timeout_s` from now at the earliest.
        oldest = min((began for _, began in self._running.values()), default=now)
        until_late_s = min(oldest, now) + self.timeout_s - now
        return min(max(until_late_s, 0.001), threading.TIMEOUT_MAX)

    def _abandon_late_threads(self) -> None:
        now = time.monotonic()
        late: list[threading.Thread] = []
        for thread, (_, began) in self._running.items():
            if now - began >= self.timeout_s:
                late.append(thread)

        for thread in late:
            indexes, _ = self._running.pop(thread)
            self.abandoned.append(thread)
            interrupt(thread)
            for index in indexes:
                self._record(index, Outcome(timed_out=True))

        waiting = len(self._waiting)
        room = max(MAX_THREADS, self.at_once) - len(self._running)
        # Start twice as many threads as were late: if every call hangs, the batch ends after a few
        # time-outs instead of one per sample.
        self._start_threads(min(2 * len(late), waiting, room))


class ProcessThreads(Threads):
    """Calls of a function in processes. A thread sends a process several at a time.

    That lowers the cost of each. A late process is killed, so that its thread is not abandoned.
    """

    function: ProcessFunction

    def __init__(
        self, function: ProcessFunction, timeout_s: float, stop_at_failure: bool, at_once: int
    ) -> None:
        super().__init__(function, math.inf, stop_at_failure, at_once)
        self.process_timeout_s = timeout_s
        self._chunk = 1

    def _take(self) -> list[int]:
        count = min(self._chunk, len(self._waiting))
        if self.at_once > 1:  # leave some for the other threads
            half_a_share = math.ceil(len(self._waiting) / (2 * self.at_once))
            count = min(count, half_a_share)
        return [self._waiting.popleft() for _ in range(count)]

    def _call(self, indexes: list[int]) -> list[Outcome]:
        packed: list[str] = []
        size = 0
        for index in indexes:
            try:
                packed.append(pack_call(**self._calls[index][1]()))
            except BaseException as error:  # noqa: BLE001  (as in `_call_in_thread`)
                if not packed:
                    return [Outcome(error=error)]
                break  # make the packed calls first; this one comes first in the next message
            size += len(packed[-1])
            if size > CHUNK_CHARACTERS:
                break

        try:
            return self.function.call_each(packed, self.process_timeout_s, self.stop_at_failure)
        # The process failed to start, or to load the file.
        except BaseException as error:  # noqa: BLE001
            return [Outcome(error=error)]

    def _end_calls(self, indexes: list[int], outcomes: list[Outcome], began: float) -> None:
        """Record outcomes; put calls without one back at the front of the queue."""
        rest = indexes[len(outcomes) :]
        self._waiting.extendleft(reversed(rest))
        if rest:
            self._chunk = 1
            free = self.at_once - len(self._running)
            self._start_threads(min(len(rest), free))
        elif time.monotonic() - began > CHUNK_S:
            self._chunk = max(self._chunk // 2, 1)
        else:
            self._chunk = min(2 * self._chunk, MAX_CHUNK)
        super()._end_calls(indexes, outcomes, began)


def call_now(function: RewardFunction, sample: dict[str, Any]) -> Outcome:
    """Call a plain function in this thread."""
    try:
        return Outcome(value=function(**sample))
    except HelperTimeout:
        return Outcome(timed_out=True)
    # A user's code may raise anything; even sys.exit() is a failure of this sample only.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return Outcome(error=error)


def _call_in_thread(function: RewardFunction, arguments: Arguments) -> Outcome:
    try:
        return call_now(function, arguments())
    except LateCall:
        raise
    # An exception would end the thread silently, which would look like a late call.
    except BaseException as error:  # noqa: BLE001
        return Outcome(error=error)
