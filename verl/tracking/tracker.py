"""Send the records of a run to all of its trackers."""

import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import verl.tracking.console  # noqa: F401  (registers itself)
from verl.tracking.backends import TrackerBackend, TrackerSettings, tracker_backends
from verl.utils.entry import is_about_files
from verl.utils.errors import TrackerError
from verl.utils.logging import logger
from verl.utils.user_parts import NamedPart


class Tracker:
    """Sends the records of a run to every tracker that `trainer.logger` names.

    Raises ConfigError for an unknown name, MissingDependencyError if the package of a tracker is
    not installed, and TrackerError, with the name of the tracker, for any other error that one
    raises. Errors about files, the disk and standard output stay an OSError. A tracker that fails
    does not keep a record from the others; one that does not start closes those that have started.

    Args:
        backends: names from `tracker_backends`.
        settings: the facts about the run.
    """

    def __init__(self, backends: Sequence[str], settings: TrackerSettings) -> None:
        # All names are looked up before any run is started at a remote tracker.
        factories = {name: tracker_backends.get(name) for name in backends}
        self.backends: list[TrackerBackend] = []
        self.is_finished = False
        self._parts: list[NamedPart] = []
        with self.closed_after_error():
            for name, factory in factories.items():
                part = NamedPart("tracker", name, factory, TrackerError)
                with part.naming_errors(passes=_is_reported):
                    self.backends.append(factory(settings))
                self._parts.append(part)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record the metrics of a step.

        They are real numbers of Python or numpy, or tensors without dimensions. NaN and infinities
        are passed on as they are; the "file" tracker writes null for them. Raises TypeError if a
        metric is no number.
        """
        numbers_only = {name: _number(name, value) for name, value in metrics.items()}
        self._each(lambda backend: backend.log(numbers_only, step))

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Record samples, one dict each."""
        self._each(lambda backend: backend.log_generations(rows, step))

    def rewind(self, step: int) -> None:
        """Forget all records of steps after `step`, from which the run continues.

        0 means that the run starts over.
        """
        self._each(lambda backend: backend.rewind(step))

    def finish(self) -> None:
        """Write everything and close."""
        self.is_finished = True
        self._each(lambda backend: backend.finish())

    @contextmanager
    def closed_after_error(self) -> Iterator[None]:
        """Call `rescue` if an error or an interrupt ends the code within."""
        try:
            yield
        except BaseException:
            self.rescue()
            raise

    def rescue(self) -> None:
        """Call `finish` after an error that ends the run. A second error is only a warning."""
        try:
            self.finish()
        except Exception as error:  # noqa: BLE001 - logged, while the first error propagates
            logger.warning("A tracker may have lost its latest records: %s", error)

    def _each(self, call: Callable[[TrackerBackend], None]) -> None:
        def named(part: NamedPart, backend: TrackerBackend) -> None:
            with part.naming_errors(passes=_is_reported):
                call(backend)

        calls = {}
        for part, backend in zip(self._parts, self.backends):
            calls[part.name] = partial(named, part, backend)
        call_all(calls)


def call_all(calls: Mapping[str, Callable[[], None]]) -> None:
    """Call every tracker, by name, also after one has failed.

    Raises the error of a single tracker as it is, and those of several as one TrackerError.
    """
    errors: dict[str, Exception] = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised below, after the other trackers
            errors[name] = error

    if not errors:
        return
    first = next(iter(errors.values()))
    if len(errors) == 1:
        raise first
    texts = [f"{name}: {error}" for name, error in errors.items()]
    raise TrackerError(f"{len(errors)} trackers failed. {' '.join(texts)}") from first


def _is_reported(error: BaseException) -> bool:
    """Return whether entry points have a message of their own for an error."""
    return isinstance(error, (ModuleNotFoundError, BrokenPipeError)) or is_about_files(error)


def _number(name: str, value: Any) -> int | float:
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"Metric '{name}' must be a number, got {value!r:.100} of type {type(value).__name__}."
        )
    return int(value) if isinstance(value, numbers.Integral) else float(value)
