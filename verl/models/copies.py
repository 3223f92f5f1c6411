"""Check that a part of a model has the code that one of our kernels replaces."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any


def is_copy(function: Callable[..., Any], original: Callable[..., Any]) -> bool:
    """Return whether both have the same source text. transformers copies code between families."""
    try:
        return _source(function) == _source(original)
    except (OSError, TypeError):  # without source there is no proof
        return False


@cache
def _source(function: Callable[..., Any]) -> str:
    return inspect.getsource(inspect.unwrap(function))
