"""Define the trackers that record metrics and samples, by the names of `trainer.logger`."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from verl.tracking.json_lines import drop_lines_after, plain, repair_last_line, to_json_line
from verl.tracking.samples import write_samples
from verl.utils.errors import ConfigError
from verl.utils.imports import require
from verl.utils.logging import logger
from verl.utils.registry import Registry
from verl.utils.whole_file import errors_name

Metrics = Mapping[str, float]
Rows = Sequence[Mapping[str, Any]]


@dataclass(kw_only=True, slots=True)
class TrackerSettings:
    """The facts about a run that a backend may need."""

    project_name: str  # remote trackers group runs by it
    experiment_name: str
    folder: Path  # local trackers write here
    config: Mapping[str, Any]  # the whole configuration, stored with the run
    total_steps: int | None = None  # for the console's "[Step 1/10]"; None: unknown
    log_interval: int = 1  # the console prints one step in so many; other trackers record all


class TrackerBackend:
    """Base of all trackers. A tracker leaves out the methods that its tool does not support.

    Metrics come as plain Python ints and floats, which may be NaN or infinite: each tool shows
    these in its own way.
    """

    def __init__(self, settings: TrackerSettings) -> None:
        self.settings = settings

    def log(self, metrics: Metrics, step: int) -> None:
        """Record the metrics of a step."""
        raise NotImplementedError

    def log_generations(self, rows: Rows, step: int) -> None:
        """Record samples, one dict each ("input", "output", "score", ...)."""

    def rewind(self, step: int) -> None:
        """Forget all records of steps after `step`, from which the run continues."""

    def finish(self) -> None:
        """Write everything recorded. No call follows."""


tracker_backends: Registry[Callable[[TrackerSettings], TrackerBackend]] = Registry(
    "tracker (trainer.logger)"
)


@tracker_backends.register("file")
class FileBackend(TrackerBackend):
    """JSON lines in `{folder}/metrics.jsonl`, and samples in `{folder}/generations/`.

    A line is valid JSON, {"step": 3, "actor/lr": 1e-06, ...}, with null for NaN and infinities. It
    is handed to the system at once, so a killed process loses none. A line that is incomplete
    because the machine went down is removed at the next start.
    """

    def __init__(self, settings: TrackerSettings) -> None:
        super().__init__(settings)
        settings.folder.mkdir(parents=True, exist_ok=True)
        self.path = settings.folder / "metrics.jsonl"
        repair_last_line(self.path)
        self._file = self.path.open("ab")

    def log(self, metrics: Metrics, step: int) -> None:
        line = to_json_line({"step": step, **metrics})
        if os.fstat(self._file.fileno()).st_nlink == 0:
            self._return_to_removed_folder()
        # One write for the whole line: no other process can write in between.
        with errors_name(self.path):
            self._file.write(line)
            self._file.flush()

    def _return_to_removed_folder(self) -> None:
        logger.warning(
            "%s was removed while this run wrote there. Its earlier lines are gone; the file is "
            "created again.",
            self.path,
        )
        self._file.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")

    def log_generations(self, rows: Rows, step: int) -> None:
        write_samples(self.settings.folder / "generations", step, rows)

    def rewind(self, step: int) -> None:
        """Drop the lines of later steps; all of them at step 0."""
        self._file.close()
        drop_lines_after(self.path, step)
        self._file = self.path.open("ab")

    def finish(self) -> None:
        self._file.close()


@tracker_backends.register("tensorboard")
class TensorboardBackend(TrackerBackend):
    """Event files in `{folder}/tensorboard`."""

    def __init__(self, settings: TrackerSettings) -> None:
        super().__init__(settings)
        require("tensorboard", "trainer.logger=tensorboard", "pip install tensorboard")
        self._module = require(
            "torch.utils.tensorboard", "trainer.logger=tensorboard", "pip install tensorboard"
        )
        self._writer = self._open(None)

    def log(self, metrics: Metrics, step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_generations(self, rows: Rows, step: int) -> None:
        for number, row in enumerate(rows):
            text = "\n\n".join(f"**{name}**: {value}" for name, value in row.items())
            self._writer.add_text(f"generations/{number}", text, step)

    def rewind(self, step: int) -> None:
        """Hide the events of later steps, which stay in the files, by `purge_step`."""
        self._writer.close()
        self._writer = self._open(step + 1 if step > 0 else 0)

    def finish(self) -> None:
        self._writer.close()

    def _open(self, purge_step: int | None) -> Any:
        return self._module.SummaryWriter(
            str(self.settings.folder / "tensorboard"), purge_step=purge_step
        )


@tracker_backends.register("wandb")
class WandbBackend(TrackerBackend):
    """Weights & Biases, online or with WANDB_MODE=offline.

    The run's id is kept in `{folder}/wandb_run_id`, so that a resumed training continues the same
    run. The server ignores metrics of a step that it already has.
    """

    def __init__(self, settings: TrackerSettings) -> None:
        super().__init__(settings)
        self._wandb = require("wandb", "trainer.logger=wandb", "pip install wandb")
        settings.folder.mkdir(parents=True, exist_ok=True)
        self._id_file = settings.folder / "wandb_run_id"
        earlier = self._id_file.read_text().strip() if self._id_file.exists() else None
        self._continues = bool(earlier)
        self._run = self._open(earlier)

    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, rows: Rows, step: int) -> None:
        columns = list(dict.fromkeys(chain.from_iterable(rows)))  # in the order of appearance
        cells = []
        for row in rows:
            cells.append([_cell(row.get(name)) for name in columns])
        table = self._wandb.Table(columns=columns, data=cells)
        self._run.log({"val/generations": table}, step=step)

    def rewind(self, step: int) -> None:
        """Start a new run if the training starts over in the folder of an earlier one."""
        if step == 0 and self._continues:
            self._run.finish()
            self._continues = False
            self._run = self._open(None)

    def finish(self) -> None:
        self._run.finish()

    def _open(self, run_id: str | None) -> Any:
        try:
            run = self._wandb.init(
                project=self.settings.project_name,
                name=self.settings.experiment_name,
                config=plain(self.settings.config),
                dir=str(self.settings.folder),
                id=run_id,
                resume="allow" if run_id else None,
            )
        except self._wandb.Error as error:
            way_out = (
                "Log in (wandb login), write to the disk with WANDB_MODE=offline, or leave wandb "
                "out"
            )
            raise ConfigError(f"trainer.logger=wandb cannot be used: {error} {way_out}.") from error

        self._id_file.write_text(run.id)
        return run


@tracker_backends.register("mlflow")
class MlflowBackend(TrackerBackend):
    """MLflow, at MLFLOW_TRACKING_URI or in ./mlruns. A resumed training is a new MLflow run."""

    def __init__(self, settings: TrackerSettings) -> None:
        super().__init__(settings)
        self._mlflow = require("mlflow", "trainer.logger=mlflow", "pip install mlflow")
        self._mlflow.set_experiment(settings.project_name)
        self._mlflow.start_run(run_name=settings.experiment_name)
        self._mlflow.log_dict(plain(settings.config), "config.json")

    def log(self, metrics: Metrics, step: int) -> None:
        renamed = {_mlflow_name(name): value for name, value in metrics.items()}
        self._mlflow.log_metrics(renamed, step=step)

    def log_generations(self, rows: Rows, step: int) -> None:
        self._mlflow.log_dict({"rows": plain(rows)}, f"generations/{step}.json")

    def finish(self) -> None:
        self._mlflow.end_run()


def _mlflow_name(metric: str) -> str:
    """Return a name that MLflow accepts: mean@8 becomes mean_at_8, other signs an underscore."""
    return re.sub(r"[^\w./ -]", "_", metric.replace("@", "_at_"))


@tracker_backends.register("swanlab")
class SwanlabBackend(TrackerBackend):
    """SwanLab, in the mode that SWANLAB_MODE names. A resumed training is a new SwanLab run."""

    def __init__(self, settings: TrackerSettings) -> None:
        super().__init__(settings)
        self._swanlab = require("swanlab", "trainer.logger=swanlab", "pip install swanlab")
        self._swanlab.init(
            project=settings.project_name,
            experiment_name=settings.experiment_name,
            config=plain(settings.config),
            logdir=str(settings.folder / "swanlab"),
        )

    def log(self, metrics: Metrics, step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def log_generations(self, rows: Rows, step: int) -> None:
        texts = []
        for row in rows:
            lines = [f"{name}: {value}" for name, value in row.items()]
            texts.append(self._swanlab.Text("\n".join(lines)))
        if texts:
            self._swanlab.log({"val/generations": texts}, step=step)

    def finish(self) -> None:
        self._swanlab.finish()


def _cell(value: Any) -> Any:
    """Keep numbers and None, and turn everything else to text.

    wandb fixes a column's type at its first row, so lists and dicts of several shapes would fail.
    """
    value = plain(value)
    if value is None or isinstance(value, (int, float)):
        return value
    return str(value)
