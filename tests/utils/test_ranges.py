"""Ranges of whole numbers as arrays."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl.utils.ranges import joined_ranges


@given(st.lists(st.tuples(st.integers(-9, 99), st.integers(0, 5)), max_size=8))
def test_ranges_follow_one_another(ranges: list[tuple[int, int]]):
    begins, counts = np.array(ranges, np.int64).reshape(-1, 2).T
    wanted = [number for begin, count in ranges for number in range(begin, begin + count)]
    assert joined_ranges(begins, counts).tolist() == wanted
