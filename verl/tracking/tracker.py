"""One front for all trackers of a run."""

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import verl.tracking.console  # noqa: F401  (registers itself)
from verl.tracking.backends import TrackerBackend, TrackerSettings, tracker_backends


class Tracker:
    """Sends what a run records to every tracker that `trainer.logger` names.

    Args:
        backends: names from `tracker_backends`.

    Raises:
        ConfigError: an unknown name. MissingDependencyError: a tracker's package is not installed.
    """

    def __init__(self, backends: Sequence[str], settings: TrackerSettings) -> None:
        # All names are looked up before any run is started at a remote tracker.
        factories = [tracker_backends.get(name) for name in dict.fromkeys(backends)]
        self.backends: list[TrackerBackend] = [factory(settings) for factory in factories]

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record the metrics of a step: real numbers, also of numpy or of tensors without
        dimensions.

        NaN and infinities are handed on as they are; the "file" tracker writes null for them.

        Raises:
            TypeError: a metric is something else than a number.
        """
        numbers_only = {name: _number(name, value) for name, value in metrics.items()}
        for backend in self.backends:
            backend.log(numbers_only, step)

    def log_generations(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Record samples, one dict each."""
        for backend in self.backends:
            backend.log_generations(rows, step)

    def rewind(self, step: int) -> None:
        """Forget what was recorded of steps after `step`, from which the run goes on; 0 is a start
        afresh."""
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
