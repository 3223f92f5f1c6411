"""What the CPU kernels share: how numba compiles them, and functions that it can compute for many numbers at once."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from verl.utils.logging import logger

# Sums may be added up in any order. NaN and infinity stay what they are.
_OPTIONS: dict[str, Any] = {
    "nogil": True,  # other threads have Python meanwhile
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "arcp", "nsz"},
}


def compiled(function: Callable[..., Any]) -> Any:
    """`function`, compiled at its first call and kept on disk for the next process."""
    try:
        return njit(cache=True, **_OPTIONS)(function)
    except RuntimeError as error:  # neither our folder nor the user's own can be written to
        logger.info(
            f"rollout: {error}. Every process compiles it again, in seconds, unless NUMBA_CACHE_DIR is a folder."
        )
        return njit(**_OPTIONS)(function)


inlined = njit(inline="always")  # into what is compiled, by whose rules it goes


@inlined
def exp(x: np.float32) -> np.float32:
    """e^x within 3e-7 of itself; 2e-38 for all x below -87 and 2e38 for all above 88, which callers do not tell from 0
    and infinity. Without a branch."""
    x = np.float32(-87) if x < np.float32(-87) else x
    x = np.float32(88) if x > np.float32(88) else x
    # e^x = 2^n e^f, |f| <= log(2) / 2. log(2) = 0.693359375 - 0.000212..., of few bits, so that n times it is exact.
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    f = x - n * np.float32(0.693359375)
    f = f + n * np.float32(2.12194440e-4)
    # The Taylor series to f^7; its rest is below 1e-8.
    power = np.float32(1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        power = power * f + np.float32(1 / divisor)
    return power * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@inlined
def log1p(x: np.float32) -> np.float32:
    """log(1 + x) for -1 <= x < 0 within 3e-7 of itself, and at least -22. Without a branch."""
    # 1 + x = 2^n m with sqrt(1/2) <= m < sqrt(2), and f = m - 1: for n = 0 that is x, whose last digits 1 + x has lost.
    bits = np.int32(np.float32(max(np.float32(1) + x, np.float32(2.0**-33))).view(np.int32) - np.int32(0x3F3504F3))
    n = np.float32(np.int32(bits >> np.int32(23)))
    m = np.int32(np.int32(bits & np.int32(0x007FFFFF)) + np.int32(0x3F3504F3)).view(np.float32)
    f = x if n == np.float32(0) else m - np.float32(1)
    # log((1 + s) / (1 - s)) = 2 (s + s^3 / 3 + s^5 / 5 + ...) with |s| < 0.172
    s = f / (np.float32(2) + f)
    square = s * s
    series = np.float32(1 / 9)
    for divisor in (7, 5, 3):
        series = series * square + np.float32(1 / divisor)
    log = np.float32(2) * s + np.float32(2) * s * square * series
    return max(n * np.float32(0.6931471805599453) + log, np.float32(-22))


@compiled
def largest_of(numbers: NDArray[np.float32]) -> np.float32:
    """The largest number, or a NaN that has no sign. As integers: those with the bits of floats are in the order of the
    floats, the negative ones in reverse, and many integers are compared at once."""
    bits = numbers.view(np.int32)
    largest = np.int32(-(2**31))
    for i in range(len(bits)):
        largest = max(largest, np.int32(bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    return np.int32(largest ^ ((largest >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)
