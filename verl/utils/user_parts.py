"""What a user registers by name: whose it is, and errors that name it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from verl.utils.errors import AlgorithmError, VerlError, line_in


def is_our_own(function: Callable[..., Any]) -> bool:
    """Whether a registered function comes with this package, so that we know what it reads."""
    return getattr(function, "__module__", "").startswith("verl.")


@dataclass(frozen=True)
class NamedPart:
    """A registered function as errors tell of it."""

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
        """What a user's function raises within is an AlgorithmError with its name, file and line.
        Errors on purpose, those that `passes` knows, and those of our own functions stay what they
        are."""
        try:
            yield
        except Exception as error:
            if is_our_own(self.function) or isinstance(error, VerlError) or passes(error):
                raise
            line = line_in(error, self._file)
            where = "" if line is None else f" in line {line}"
            raise AlgorithmError(
                f"{self} raised {type(error).__name__}{where}: {error}. Mend it; VERL_TRACEBACK=1 "
                "shows the way there."
            ) from error

    def must_return(self, expected: str, got: Any) -> AlgorithmError:
        """The error for an answer of another kind or shape."""
        return AlgorithmError(f"{self} must return {expected}, got {in_words(got)}.")


def in_words(value: Any) -> str:
    """What a value is, with the shapes of tensors."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(map(in_words, value))}"
    shape = getattr(value, "shape", None)
    return (
        type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
    )
