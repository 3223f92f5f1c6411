"""Send the records of a run to all of its trackers."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import verl.tracking.console  # noqa: F401  (registers itself)
from verl.tracking.backends import TrackerBackend, TrackerSettings, tracker_backends


class Tracker:
    """Sends the records of a run to every tracker that `trainer.logger` names.

    Raises ConfigError for an unknown name, and MissingDependencyError if the package of a tracker
    is not installed.

    Args:
        backends: names from `tracker_backends`.
        settings: the facts about the run.
    """

    def __init__(self, backends: Sequence[str], settings: TrackerSettings) -> None:
        # All names are looked up before any run is started at a remote tracker.
        factories = [tracker_backends.get(name) for name in dict.fromkeys(backends)]
        self.backends: list[TrackerBackend] = [factory(settings) for factory in factories]

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record the metrics of a step.

        They are real numbers of Python or numpy, or tensors without dimensions. NaN and infinities
        are passed on as they are; the "file" tracker writes null for them. Raises TypeError if a
        metric is no number.
        """
        numbers_only = {name: _number(name, value) for name, value in metrics.items()}
        for backend in self.backends:
            backend.log(numbers_only, step)

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Record samples, one dict each."""
        for backend in self.backends:
            backend.log_generations(rows, step)

    def rewind(self, step: int) -> None:
        """Forget all records of steps after `step`, from which the run continues.

        0 means that the run starts over.
        """
        for backend in self.backends:
            backend.rewind(step)

    def finish(self) -> None:
        """Write everything and close."""
        for backend in self.backends:
            backend.finish()


def _number(name: str, value: Any) -> int | float:
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"Metric '{name}' must be a number, got {value!r:.100} of type {type(value).__name__}."
        )
    return int(value) if isinstance(value, numbers.Integral) else float(value)
