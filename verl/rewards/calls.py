"""Call a reward function for many samples, each with a deadline, so that no call can hang the run.

A plain function is called for one sample after another in a worker thread, a coroutine function for
all samples at once in an event loop. Python cannot stop a running call. A late call is abandoned in
its daemon thread, which does not keep the process from exiting, and the remaining samples go to new
threads. When too many calls are abandoned, calls move to processes, which can be killed.
"""

import contextvars
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from verl.rewards.coroutines import Coroutines, start_loop
from verl.rewards.helper import HelperTimeout
from verl.rewards.origin import is_coroutine_function, runs_here, uses_signals
from verl.rewards.outcome import Arguments, Outcome, Outcomes, RewardFunction
from verl.rewards.processes import ProcessFunction, pack_call
from verl.rewards.watch import THREAD_NAME, LockWatch, forbid_exit
from verl.utils.deadline import call_ends
from verl.utils.errors import ConfigError, RewardError, causes
from verl.utils.logging import logger, say_once
from verl.utils.threads import LateCall, LoopThread, interrupt

# Threads that one batch may use once calls hang; before the first time-out it uses one.
MAX_THREADS = 32
# Abandoned calls that still run, over the whole run. More would only use memory.
MAX_HANGING = 256
# Processes that make the calls once MAX_HANGING is exceeded.
NUM_PROCESSES = 4
# Limits on the calls that a process gets in one message: their number, duration and size.
MAX_CHUNK = 128
CHUNK_S = 0.02
CHUNK_CHARACTERS = 1 << 20


class Caller:
    """Call `function(**arguments)` for the samples of a batch.

    Args:
        function: plain or coroutine function. A plain one runs in one thread, one sample at a time,
            as long as none is late. If its file imports signal or math_verify, it runs in the
            calling thread without our deadline: signals work only there, and in another thread such
            functions often return 0 silently.
        timeout_s: seconds a call may take; may be infinite. For a ProcessFunction they count from
            the moment at which its process gets a sample, so its start does not count.
    """

    def __init__(self, function: RewardFunction, timeout_s: float) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self.is_async = is_coroutine_function(function)
        self.in_caller = not self.is_async and uses_signals(function)
        self._hanging: list[threading.Thread] = []
        self._loop: LoopThread | None = None
        if runs_here(function):
            forbid_exit()

    def __call__(
        self,
        arguments: Sequence[dict[str, Any]],
        stop_at_failure: bool = False,
        at_once: int = 1,
        timeout_s: float | None = None,
    ) -> Outcomes:
        """Return one outcome per sample, in order.

        Args:
            stop_at_failure: make no further call after a failure; their outcomes are None.
            at_once: threads that call a plain function.
            timeout_s: a shorter deadline for these calls.

        Raises:
            RewardError: more than MAX_HANGING calls hang, and the function cannot be called in
                another process.
        """
        if self.in_caller:
            return self._call_here(arguments, stop_at_failure)

        calls = self.begin(stop_at_failure, at_once, timeout_s)
        for row, sample in enumerate(arguments):
            calls.add(row, functools.partial(dict, sample))
        outcomes = self.finish(calls)

        # `finish` may have found that the function works only in the calling thread.
        if self.in_caller:
            return self._call_here(arguments, stop_at_failure)
        return outcomes

    def begin(
        self, stop_at_failure: bool = False, at_once: int = 1, timeout_s: float | None = None
    ) -> "_Threads | Coroutines":
        """Start calls that run as their samples are added, until `finish`.

        The function must not be `in_caller`.
        """
        deadline = self.timeout_s if timeout_s is None else min(timeout_s, self.timeout_s)
        if self.is_async:
            self._loop = self._loop or start_loop()
            return Coroutines(self.function, deadline, self._loop)
        return _Threads(self.function, deadline, stop_at_failure, at_once)

    def finish(self, calls: "_Threads | Coroutines") -> Outcomes:
        """Wait for the outcomes of all added samples, in that order; see `__call__`."""
        try:
            calls.run()
        finally:
            calls.drop()

        if calls.abandoned and self.is_async:
            self._loop = None
        self._remember_hanging(calls.abandoned)

        for outcome in calls.outcomes:
            if outcome is not None and _needs_main_thread(outcome.error):
                self.in_caller = True
        return calls.outcomes

    def _call_here(self, arguments: Sequence[dict[str, Any]], stop_at_failure: bool) -> Outcomes:
        say_once(
            "The reward function limits its time by signals, which work in the main thread only. "
            "It is called there, and reward_model.timeout_s does not apply."
        )
        outcomes: Outcomes = [None] * len(arguments)
        for index, sample in enumerate(arguments):
            outcome = outcomes[index] = _call(self.function, sample)
            if stop_at_failure and outcome.failed:
                break
        return outcomes

    def _remember_hanging(self, threads: list[threading.Thread]) -> None:
        self._hanging = [thread for thread in (*self._hanging, *threads) if thread.is_alive()]
        if len(self._hanging) <= MAX_HANGING:
            return
        fact = (
            f"{len(self._hanging)} calls of the reward function still hang, more than the "
            f"{MAX_HANGING} tolerated"
        )

        try:
            self.function = ProcessFunction(self.function, num_processes=NUM_PROCESSES)
        except ConfigError as error:
            raise RewardError(
                f"{fact}. Give it a time limit of its own, such as timeout= of an HTTP request. It "
                f"cannot be called in processes, which could be killed: {error}"
            ) from error

        self.is_async = False
        self._hanging = []
        logger.warning(
            "%s. From now on it is called in %d processes, which are killed when late.",
            fact,
            NUM_PROCESSES,
        )


def _needs_main_thread(error: BaseException | None) -> bool:
    return any(
        isinstance(cause, ValueError) and "signal only works in main thread" in str(cause)
        for cause in causes(error)
    )


def _call(function: RewardFunction, sample: dict[str, Any]) -> Outcome:
    try:
        return Outcome(value=function(**sample))
    except HelperTimeout:
        return Outcome(timed_out=True)
    # A user's code may raise anything; even sys.exit() is a failure of this sample only.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return Outcome(error=error)


def _call_in_thread(function: RewardFunction, arguments: Arguments) -> Outcome:
    try:
        return _call(function, arguments())
    except LateCall:
        raise
    # An exception would end the thread silently, which would look like a late call.
    except BaseException as error:  # noqa: BLE001
        return Outcome(error=error)


class _Threads:
    """The calls of one batch in threads, each of which takes the next sample.

    Threads wait for more samples until `run`, which watches the deadlines. With `stop_at_failure`,
    no call starts for a row after a failed one, so the first failure by row is known.
    """

    def __init__(
        self,
        function: RewardFunction,
        timeout_s: float,
        stop_at_failure: bool = False,
        at_once: int = 1,
    ) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self.process_timeout_s = timeout_s
        if isinstance(function, ProcessFunction):
            self.timeout_s = math.inf  # a late process is killed, so its thread is not abandoned
        self.stop_at_failure = stop_at_failure
        self.at_once = at_once
        self.outcomes: Outcomes = []
        self.abandoned: list[threading.Thread] = []
        self._calls: list[tuple[int, Arguments]] = []  # with their rows
        self._waiting: deque[int] = deque()  # places in _calls

        self._chunk = 1
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
            if isinstance(self.function, ProcessFunction):
                outcomes = self._call_in_process(self.function, indexes)
            else:
                outcomes = [_call_in_thread(self.function, self._calls[indexes[0]][1])]
            # Late calls that end before `run` checks the deadlines time out here.
            if time.monotonic() - began >= self.timeout_s:
                outcomes = [Outcome(timed_out=True)]

    def _take(self) -> list[int]:
        """Take the next call, or several for a process, which lowers the cost of each."""
        if not isinstance(self.function, ProcessFunction):
            return [self._waiting.popleft()]
        count = min(self._chunk, len(self._waiting))
        if self.at_once > 1:  # leave some for the other threads
            half_a_share = math.ceil(len(self._waiting) / (2 * self.at_once))
            count = min(count, half_a_share)
        return [self._waiting.popleft() for _ in range(count)]

    def _call_in_process(self, function: ProcessFunction, indexes: list[int]) -> list[Outcome]:
        """Return the outcomes of the first of these calls, of one at least."""
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
            return function.call_each(packed, self.process_timeout_s, self.stop_at_failure)
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
