"""`Tracking` and `ValidationGenerationsLogger` of verl 0.5 over the trackers here."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verl.tracking.backends import TrackerSettings
from verl.tracking.tracker import Tracker, call_all
from verl.utils.errors import BatchError
from verl.utils.secrets import masked_values

_SAMPLE_COLUMNS: Sequence[str] = ("input", "output", "score")

# Trackers of the Tracking that is open in this process, by name.
_of_run: dict[str, Tracker] = {}


class Tracking:
    """Send metrics to trackers.

    Args:
        project_name, experiment_name: names of the run for trackers.
        default_backend: console, file, tensorboard, wandb, mlflow or swanlab, or a list of them.
        config: stored along with the run, without its secrets.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        backends = [default_backend] if isinstance(default_backend, str) else default_backend
        settings = _settings_of(project_name, experiment_name, config or {})
        self._trackers = {name: Tracker([name], settings) for name in backends}
        _of_run.update(self._trackers)

    def log(self, data: Mapping[str, Any], step: int, backend: Sequence[str] | None = None) -> None:
        """Record the metrics of a step, with all trackers or only those that `backend` names."""
        calls = {}
        for name, tracker in self._trackers.items():
            if backend is None or name in backend:
                calls[name] = partial(tracker.log, data, step)
        call_all(calls)

    def finish(self) -> None:
        """Write all pending metrics, and close the trackers."""
        for name in self._trackers:
            _of_run.pop(name, None)
        call_all({name: tracker.finish for name, tracker in self._trackers.items()})


class ValidationGenerationsLogger:
    """Send samples of a validation to trackers.

    Args:
        project_name, experiment_name: names for a tracker that is not open yet.
    """

    def __init__(self, project_name: str = "verl", experiment_name: str = "validation") -> None:
        self.project_name = project_name
        self.experiment_name = experiment_name
        self._opened: dict[str, Tracker] = {}

    def log(
        self, loggers: str | Sequence[str], samples: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record samples, each (input, output, score), with the trackers of these names.

        They go to the trackers of the `Tracking` that is open. A name that it does not have opens
        a tracker at its first use. Raises BatchError for a sample of another length.
        """
        rows = [_row_of(sample) for sample in samples]
        names = [loggers] if isinstance(loggers, str) else loggers
        for name in names:
            self._tracker(name).log_generations(rows, step)

    def finish(self) -> None:
        """Write all pending samples, and close the trackers that `log` opened."""
        opened = self._opened
        self._opened = {}
        call_all({name: tracker.finish for name, tracker in opened.items()})

    def _tracker(self, name: str) -> Tracker:
        if name in _of_run:
            return _of_run[name]
        if name not in self._opened:
            settings = _settings_of(self.project_name, self.experiment_name, {})
            self._opened[name] = Tracker([name], settings)
        return self._opened[name]


def _row_of(sample: Sequence[Any]) -> dict[str, Any]:
    if len(sample) != len(_SAMPLE_COLUMNS):
        raise BatchError(
            f"A sample must be ({', '.join(_SAMPLE_COLUMNS)}), got {len(sample)} values. Leave out "
            "the others, or join them to the output."
        )
    return dict(zip(_SAMPLE_COLUMNS, sample))


def _settings_of(
    project_name: str, experiment_name: str, config: Mapping[str, Any]
) -> TrackerSettings:
    return TrackerSettings(
        project_name=project_name,
        experiment_name=experiment_name,
        folder=Path("checkpoints") / project_name / experiment_name,
        config=masked_values(config),
    )
