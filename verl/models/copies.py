"""Whether a model's part is the code that a kernel of ours stands for."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any


def is_copy(function: Callable[..., Any], original: Callable[..., Any]) -> bool:
    """Whether both are the same text, as families of transformers copy from one another."""
    try:
        return _source(function) == _source(original)
    except (OSError, TypeError):  # no source, no proof
        return False


@cache
def _source(function: Callable[..., Any]) -> str:
    return inspect.getsource(inspect.unwrap(function))
