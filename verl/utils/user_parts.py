"""Errors of functions and classes that a user registers by name, or gives as a data set."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from verl.utils.errors import (
    AlgorithmError,
    DataError,
    VerlError,
    frame_of,
    line_in,
    text_or_source,
)


@dataclass(frozen=True)
class NamedPart:
    """A registered function or class, as errors describe it."""

    kind: str
    name: str
    function: Callable[..., Any]
    error_class: type[VerlError] = AlgorithmError

    def __str__(self) -> str:
        return f"The {self.kind} '{self.name}' ({self._file or self.function.__module__})"

    def runs_in(self, error: BaseException) -> bool:
        """Return whether the traceback of an error passes through the file of this part."""
        return line_in(error, self._file) is not None

    @property
    def _file(self) -> str | None:
        return getattr(sys.modules.get(self.function.__module__), "__file__", None)

    @contextmanager
    def naming_errors(
        self, passes: Callable[[Exception], bool] = lambda error: False
    ) -> Iterator[None]:
        """Raise errors of the function as `error_class`, with its name, file and line.

        A VerlError, and an error that `passes` accepts, stays as it is.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, VerlError) or passes(error):
                raise
            frame = frame_of(error, self._file)
            where = ""
            if frame is not None:
                where = f" in line {frame.lineno}"
                if frame.filename != self._file:
                    where += f" of {frame.filename}"
            raise self.error_class(
                f"{self} raised {type(error).__name__}{where}: {text_or_source(error, frame)}. "
                "VERL_TRACEBACK=1 shows where."
            ) from error

    def must_return(self, expected: str, got: Any) -> AlgorithmError:
        """Return the error for an answer of another kind or shape."""
        return AlgorithmError(f"{self} must return {expected}, got {describe_value(got)}.")


def errors_of_dataset(dataset: Any, rows: str) -> AbstractContextManager[None]:
    """Raise errors of reading `rows` as DataError with them and the class of the data set."""
    kind = type(dataset)
    part = NamedPart(f"call for {rows} of the data set", kind.__name__, kind, DataError)
    return part.naming_errors()


def read_row(dataset: Any, row: int) -> Any:
    """Return an item of a data set. See `errors_of_dataset`."""
    with errors_of_dataset(dataset, f"row {row}"):
        return dataset[row]


def describe_value(value: Any) -> str:
    """Describe a value by its type, and tensors by their shapes as well."""
    name = type(value).__name__
    if isinstance(value, (tuple, list)):
        return f"a {name} of {len(value)}: {', '.join(map(describe_value, value))}"

    shape = getattr(value, "shape", None)
    return name if shape is None else f"{name} of shape {tuple(shape)}"
