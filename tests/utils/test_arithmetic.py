"""Whole numbers are divided without a float, which would round large ones."""

from hypothesis import given
from hypothesis.strategies import integers

from verl.utils.arithmetic import ceil_div, round_up


@given(integers(0, 10**20), integers(1, 10**6))
def test_quotients_and_multiples_are_the_smallest_that_suffice(number, size):
    assert (ceil_div(number, size) - 1) * size < number <= ceil_div(number, size) * size
    assert number <= round_up(number, size) < number + size
    assert round_up(number, size) % size == 0
