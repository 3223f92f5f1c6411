"""Guards for a reward function that runs in the trainer's own process.

Such a function can escape our deadlines: it can end the process, keep the interpreter's lock, or
compute forever in an abandoned thread.
"""

import faulthandler
import functools
import math
import os
import threading
from collections.abc import Callable
from typing import Any

THREAD_NAME = "verl-reward"
HEARTBEAT_S = 1.0
# Time in addition to its deadline for which a call may keep the lock, to allow for a busy machine.
LOCK_GRACE_S = 30.0


@functools.cache
def forbid_exit() -> None:
    """Make `os._exit` an error in the threads that call reward functions, for the rest of the run.

    It would end the trainer without a message, with the exit code that the function chose. A
    process that the function forks may still end itself.
    """
    leave: Callable[[int], Any] = os._exit
    trainer = os.getpid()

    def leave_unless_in_a_reward(status: int) -> None:
        in_reward = threading.current_thread().name.startswith(THREAD_NAME)
        if in_reward and os.getpid() == trainer:
            raise SystemExit(f"os._exit({status}) in the process of the trainer")
        leave(status)

    os._exit = leave_unless_in_a_reward  # pyright: ignore[reportAttributeAccessIssue]


class LockWatch:
    """End the process when a call keeps the interpreter's lock beyond its deadline.

    For example, a regular expression that backtracks without end lets no other thread run, so our
    deadlines do not run either. faulthandler's own thread needs no lock: it writes the stacks of
    all threads to stderr, which show the function, and ends the process with exit code 1. A
    heartbeat postpones that as long as the lock changes hands.
    """

    def __init__(self, timeout_s: float) -> None:
        self._limit_s = timeout_s + LOCK_GRACE_S
        self._over = threading.Event()
        self._beating = False

    def start(self) -> None:
        """Start the watch, unless it runs already or there is no deadline."""
        if self._beating or not math.isfinite(self._limit_s) or self._over.is_set():
            return
        thread = threading.Thread(target=self._beat, name="verl-reward-watch", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return  # no more threads; the caller raises if it gets none for its calls either
        self._beating = True

    def stop(self) -> None:
        """End the watch."""
        self._over.set()

    def _beat(self) -> None:
        while not self._over.is_set():
            faulthandler.dump_traceback_later(self._limit_s, exit=True)
            self._over.wait(HEARTBEAT_S)
        faulthandler.cancel_dump_traceback_later()
