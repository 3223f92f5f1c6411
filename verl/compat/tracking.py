"""`Tracking` of verl 0.5 over the trackers here."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.tracking.backends import TrackerSettings
from verl.tracking.tracker import Tracker


class Tracking:
    """Sends metrics to trackers.

    Args:
        project_name, experiment_name: how trackers call the run.
        default_backend: console, file, tensorboard, wandb, mlflow or swanlab, or a list of them.
        config: stored along with the run.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        backends = [default_backend] if isinstance(default_backend, str) else default_backend
        settings = TrackerSettings(
            project_name=project_name,
            experiment_name=experiment_name,
            folder=Path("checkpoints") / project_name / experiment_name,
            config=config or {},
        )
        self._trackers = {name: Tracker([name], settings) for name in backends}

    def log(self, data: Mapping[str, Any], step: int, backend: Sequence[str] | None = None) -> None:
        """Record the metrics of a step; `backend`: with some of the trackers alone."""
        for name, tracker in self._trackers.items():
            if backend is None or name in backend:
                tracker.log(data, step)

    def finish(self) -> None:
        """Write everything and close."""
        for tracker in self._trackers.values():
            tracker.finish()
