"""Errors of functions and classes of a user: registered by name, data sets and samplers."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from verl.utils.errors import (
    AlgorithmError,
    DataError,
    VerlError,
    frame_of,
    line_in,
    text_or_source,
)
from verl.utils.sigterm import raised_by_signal


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
        self, passes: Callable[[Exception | SystemExit], bool] = lambda error: False
    ) -> Iterator[None]:
        """Raise errors of the function as `error_class`, with its name, file and line.

        `sys.exit()` is an error too: it would end the run, often with the exit code of success. A
        VerlError, an error that `passes` accepts, and an exit by the handler of a signal stay as
        they are.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            if isinstance(error, VerlError) or passes(error):
                raise
            if isinstance(error, SystemExit) and raised_by_signal(error):
                raise

            frame = frame_of(error, self._file)
            where = ""
            if frame is not None:
                where = f" in line {frame.lineno}"
                if frame.filename != self._file:
                    where += f" of {frame.filename}"

            if isinstance(error, SystemExit):
                code = "" if error.code is None else repr(error.code)
                fact = f"called sys.exit({code}){where}. Raise an error instead"
            else:
                fact = f"raised {type(error).__name__}{where}: {text_or_source(error, frame)}"
            raise self.error_class(f"{self} {fact}. VERL_TRACEBACK=1 shows where.") from error

    @contextmanager
    def keeping(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Raise `error_class` if the function changes one of the tensors in place.

        Others read them afterwards. Changes through a NumPy array that shares memory are not seen.
        """
        versions = {}
        for name, value in inputs.items():
            if isinstance(value, Tensor) and not value.is_inference():
                versions[name] = value._version
        yield
        changed = [name for name in versions if inputs[name]._version != versions[name]]
        if changed:
            raise self.error_class(
                f"{self} must leave its inputs as they are, and changed {changed[0]} in place. "
                f"Change a copy: {changed[0]}.clone()."
            )

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


def errors_of_method(
    part: str,
    made: Any,
    method: str,
    passes: Callable[[Exception | SystemExit], bool] = lambda error: False,
) -> AbstractContextManager[None]:
    """Raise errors of a method of a data set or a sampler as DataError with its class and line.

    Those of this package's own classes stay as they are: a checkpoint may have a wrong state.

    Args:
        part: "data set" or "sampler".
        made: the object that has the method.
        method: its name.
        passes: accepts errors that stay as they are, see `NamedPart.naming_errors`.
    """
    kind = type(made)
    if kind.__module__.startswith("verl."):
        return nullcontext()
    named = NamedPart(f"method {method} of the {part}", kind.__name__, kind, DataError)
    return named.naming_errors(passes)


def describe_value(value: Any) -> str:
    """Describe a value by its type, tensors and arrays by their shapes and types as well."""
    name = type(value).__name__
    if isinstance(value, (tuple, list)) and len(value) <= 4:
        return f"a {name} of {len(value)}: {', '.join(map(describe_value, value))}"

    if isinstance(value, (tuple, list)):
        return f"a {name} of {len(value)}"

    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} {name} of shape {tuple(value.shape)}"
    return name
