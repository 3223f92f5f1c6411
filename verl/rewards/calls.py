"""Call a reward function for many samples, each with a deadline, so that no call can hang the run.

A plain function is called for one sample after another in a worker thread, a coroutine function for
all samples at once in an event loop. Python cannot stop a running call. A late call is abandoned in
its daemon thread, which does not keep the process from exiting, and the remaining samples go to new
threads. When too many calls are abandoned, calls move to processes, which can be killed.
"""

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from verl.rewards.coroutines import Coroutines, start_loop
from verl.rewards.origin import is_coroutine_function, runs_here, uses_signals
from verl.rewards.outcome import Outcomes, RewardFunction
from verl.rewards.processes import ProcessFunction
from verl.rewards.threads import ProcessThreads, Threads, call_now
from verl.rewards.watch import forbid_exit
from verl.utils.errors import ConfigError, RewardError, causes
from verl.utils.logging import logger, say_once
from verl.utils.threads import LoopThread

# Abandoned calls that still run, over the whole run. More would only use memory.
MAX_HANGING = 256
# Processes that make the calls once MAX_HANGING is exceeded.
NUM_PROCESSES = 4


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
    ) -> Threads | Coroutines:
        """Start calls that run as their samples are added, until `finish`.

        The function must not be `in_caller`.
        """
        deadline = self.timeout_s if timeout_s is None else min(timeout_s, self.timeout_s)
        if self.is_async:
            if self._loop is None:
                self._loop = start_loop()
                # Its thread would go on after this caller, as after the trainer that it served.
                weakref.finalize(self, self._loop.close).atexit = False
            return Coroutines(self.function, deadline, self._loop)
        if isinstance(self.function, ProcessFunction):
            return ProcessThreads(self.function, deadline, stop_at_failure, at_once)
        return Threads(self.function, deadline, stop_at_failure, at_once)

    def finish(self, calls: Threads | Coroutines) -> Outcomes:
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
            outcome = outcomes[index] = call_now(self.function, sample)
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
