"""Errors that name the registered part that caused them."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from verl.utils.errors import AlgorithmError, VerlError, line_in


@dataclass(frozen=True)
class NamedPart:
    """A registered function, as errors describe it."""

    kind: str
    name: str
    function: Callable[..., Any]

    def __str__(self) -> str:
        return f"The {self.kind} '{self.name}' ({self._file or self.function.__module__})"

    @property
    def _file(self) -> str | None:
        return getattr(sys.modules.get(self.function.__module__), "__file__", None)

    @contextmanager
    def told(self, passes: Callable[[Exception], bool] = lambda error: False) -> Iterator[None]:
        """Raise errors of the function as AlgorithmError, with its name, file and line.

        A VerlError, and an error that `passes` accepts, stays as it is.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, VerlError) or passes(error):
                raise
            line = line_in(error, self._file)
            where = "" if line is None else f" in line {line}"
            raise AlgorithmError(
                f"{self} raised {type(error).__name__}{where}: {error}. VERL_TRACEBACK=1 shows "
                "where."
            ) from error

    def must_return(self, expected: str, got: Any) -> AlgorithmError:
        """Return the error for an answer of another kind or shape."""
        return AlgorithmError(f"{self} must return {expected}, got {in_words(got)}.")


def in_words(value: Any) -> str:
    """Describe a value, with the shapes of tensors."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(map(in_words, value))}"
    shape = getattr(value, "shape", None)
    return (
        type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
    )
