"""`model.external_lib` of a run whose wall clock jumps: back by a day, then ahead by two."""

import itertools
import os
import time

_real_ns = time.time_ns
_calls = itertools.count()
_every = int(os.environ["CHAOS_CLOCK_CALLS"])  # calls between two jumps
_JUMPS_NS = (0, -86_400 * 10**9, 2 * 86_400 * 10**9)


def _time_ns() -> int:
    jump = (next(_calls) // _every) % len(_JUMPS_NS)
    return _real_ns() + _JUMPS_NS[jump]


time.time_ns = _time_ns
time.time = lambda: _time_ns() / 1e9
