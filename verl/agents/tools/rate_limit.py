"""A limit on how many requests begin in a second."""

import threading
import time

from verl.utils.deadline import time_left


class RateLimit:
    """Lets calls through at a steady rate, from any number of threads.

    Args:
        per_s: calls a second; None or 0: no limit.
    """

    def __init__(self, per_s: float | None) -> None:
        self._interval_s = 1.0 / per_s if per_s else 0.0
        self._lock = threading.Lock()
        self._next_at = 0.0  # by time.monotonic

    def reserve(self) -> float:
        """Take the next turn, and return the seconds until it comes."""
        if self._interval_s == 0.0:
            return 0.0
        with self._lock:
            now = time.monotonic()
            turn = max(self._next_at, now)
            self._next_at = turn + self._interval_s
        return turn - now

    def wait(self) -> None:
        """Take the next turn and sleep until it comes, or until the call of this thread is late.

        Raises:
            TimeoutError: the turn would come too late.
        """
        wait_s = self.reserve()
        if wait_s <= 0:
            return
        if wait_s > time_left():
            time.sleep(max(time_left(), 0.0))
            raise TimeoutError("the limit on requests left no turn in time")
        time.sleep(wait_s)
