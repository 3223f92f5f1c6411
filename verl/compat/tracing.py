"""Marks of traced functions, by verl's names (`verl.utils.rollout_trace`).

Turns, tool calls and their seconds are recorded with every step, so the marks do nothing here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Traced = TypeVar("Traced", bound=Callable[..., Any])


def rollout_trace_op(function: Traced) -> Traced:
    """Return the function as it is."""
    return function


@contextmanager
def rollout_trace_attr(*labels: Any, **attributes: Any) -> Iterator[None]:
    """Take the labels of a trace, and run the block."""
    yield
