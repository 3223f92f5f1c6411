"""The deadline of the call of a reward or a tool in this thread or task.

A thread cannot be stopped from outside. A call that waits for a service reads its deadline here and
stops itself.
"""

import math
import time
from contextvars import ContextVar

call_ends: ContextVar[float] = ContextVar("call_ends", default=math.inf)  # by time.monotonic


def seconds_until(ends: float) -> float | None:
    """Return the seconds until then as the time-out of a socket: more than 0, None for no end."""
    if math.isinf(ends):
        return None
    return max(ends - time.monotonic(), 0.001)


def time_left() -> float:
    """Return the seconds until this thread's or task's call is late; infinite outside of a call."""
    return call_ends.get() - time.monotonic()
