"""When the reward call that runs here must have ended.

A thread cannot be stopped from outside. A call that waits for a service reads its deadline here and
stops itself.
"""

import math
import time
from contextvars import ContextVar

call_ends: ContextVar[float] = ContextVar("call_ends", default=math.inf)  # by time.monotonic


def time_left() -> float:
    """Seconds until the call of this thread or task is late; infinite outside of a call."""
    return call_ends.get() - time.monotonic()
