"""Ranges of whole numbers as arrays."""

import numpy as np
from numpy.typing import NDArray


def joined_ranges(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of the ranges [begins[i], begins[i] + counts[i]), one after the other.

    For begins [5, 0] and counts [2, 3] these are [5, 6, 0, 1, 2].
    """
    places = np.arange(counts.sum())
    return places + np.repeat(begins - (np.cumsum(counts) - counts), counts)
