"""Cases of a test that the quick suite and the slow suite divide between them."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def cases(*values: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """Return all combinations of values, for `pytest.mark.parametrize`.

    `quick` takes the values of a case. Those for which it returns False are marked `slow`.
    """
    combinations = []
    for case in itertools.product(*values):
        marks = () if quick(*case) else pytest.mark.slow
        combinations.append(pytest.param(*case, marks=marks))
    return combinations
