"""The loop around the step of any training run: resume, validate, log, save, and stop when updates
are not finite."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any, Generic, TypeVar

import torch

from verl.checkpoint.manager import CheckpointManager
from verl.checkpoint.unpickling import save_state
from verl.config import TrainConfig
from verl.config.load import config_to_show
from verl.config.sft import SFTConfig
from verl.data import RLDataLoader
from verl.protocol import DataProto
from verl.single_controller import GroupOf, WorkerGroup
from verl.single_controller.breadcrumbs import Progress
from verl.single_controller.handles import AnyWorker
from verl.tracking import Tracker, TrackerSettings
from verl.trainer.last_lines import last_lines
from verl.trainer.lowered_budgets import LoweredBudgets
from verl.trainer.phase_reports import PhaseReports
from verl.trainer.recorder import StepRecorder
from verl.trainer.resume import (
    check_config,
    log_resumed,
    read_state,
    refuse_to_pass_over,
    require_same_run,
    save_config,
)
from verl.trainer.summary import RunSummary
from verl.utils.devices import describe_device, memory_metrics, visible_device
from verl.utils.errors import (
    CheckpointError,
    ConfigError,
    NonFiniteError,
    VerlError,
    describe_error,
)
from verl.utils.logging import logger
from verl.utils.seeding import restore_rng_state, rng_state, seed_everything
from verl.utils.sigterm import raised_by_signal, sigterm_as_exit
from verl.utils.streams import show
from verl.utils.timing import PhaseTimer
from verl.workers.trained import TrainedWorker

STATE_FILE = "state.pt"  # the driver's own part of a checkpoint


Result = TypeVar("Result")
Config = TypeVar("Config", TrainConfig, SFTConfig)


class TrainingRun(ABC, Generic[Config]):
    """Runs the loop around a training step.

    A subclass defines the step, and sets the annotated attributes before `fit`.

    Args:
        config: the whole configuration, already validated.
        max_to_keep: newest checkpoints kept; None: all.
    """

    pool: Any
    tokenizer: Any
    train_loader: RLDataLoader
    val_loader: RLDataLoader | None
    total_steps: int
    trains = True  # False: the run draws no batch of the loader

    def __init__(self, config: Config, max_to_keep: int | None) -> None:
        self.config = config
        trainer = config.trainer
        if trainer.num_threads is not None:
            torch.set_num_threads(trainer.num_threads)
        self.device = visible_device(trainer.device)
        seed_everything(trainer.seed)
        self.checkpoints = CheckpointManager(
            Path(trainer.default_local_dir), max_to_keep=max_to_keep
        )
        self.lowered_budgets = LoweredBudgets(self.checkpoints.root)
        self.checkpoints.require_named(trainer.resume_mode, trainer.resume_from_path)
        self.global_step = 0
        self.has_begun = False  # a step, in this process
        self.has_resumed = False  # or has found nothing to resume
        self.skipped_in_a_row = 0
        self.metrics: dict[str, float] = {}
        self.timer = PhaseTimer()
        self.reports = PhaseReports(self.progress, is_on=trainer.progress)
        self.summary = RunSummary()
        self.recorder = StepRecorder(trainer.record, self.checkpoints.root)

    def start_role(
        self, role: str, worker_class: type[AnyWorker], *args: Any, **kwargs: Any
    ) -> GroupOf[AnyWorker]:
        """Start the workers of a role on the ranks of its placement."""
        with self.reports.phase(f"load {role}"):
            return self.pool.start(
                role, worker_class, *args, deadline_s=self.config.trainer.deadline_s, **kwargs
            )

    def worker_groups(self) -> list[WorkerGroup]:
        """Return the groups of all roles, each once."""
        # A list first: the thread of the reports asks while others may set attributes.
        parts = list(vars(self).values())
        groups = [part for part in parts if isinstance(part, WorkerGroup)]
        return list(dict.fromkeys(groups))

    def progress(self) -> list[Progress]:
        """Return how far the ranks are with the methods that they run."""
        groups = {group.processes: group for group in self.worker_groups()}
        reports: list[Progress] = []
        for group in groups.values():
            reports += group.progress()
        return reports

    def require_workers(self) -> None:
        """Raise ConfigError where `init_workers` has not been called."""
        if not hasattr(self, "tracker"):
            raise ConfigError(
                f"{type(self).__name__}.fit needs models, and none is loaded. Call init_workers() "
                "before it."
            )

    @property
    def test_freq(self) -> int:
        """Return the steps between two validations; -1: none."""
        return int(self.config.trainer.test_freq)

    @property
    def save_freq(self) -> int:
        """Return the steps between two checkpoints; -1: none."""
        return int(self.config.trainer.save_freq)

    def start_tracker(self) -> None:
        """Start the trackers. Runs before models load, so a missing package or an unwritable folder
        fails within seconds."""
        self._log_device()
        self._check_folder()
        trainer = self.config.trainer
        settings = TrackerSettings(
            project_name=trainer.project_name,
            experiment_name=trainer.experiment_name,
            config=config_to_show(self.config),
            folder=Path(trainer.default_local_dir).expanduser(),
            total_steps=self.total_steps,
            log_interval=trainer.log_interval,
        )
        self.tracker = Tracker(trainer.logger, settings)

    def _log_device(self) -> None:
        # Under torchrun the launcher knows the number of nodes.
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", self.config.trainer.nnodes))
        logger.info(
            "Device: %s; %d rank%s on %d node%s",
            describe_device(self.device),
            self.pool.world_size,
            "s" if self.pool.world_size > 1 else "",
            nodes,
            "s" if nodes > 1 else "",
        )

    def _check_folder(self) -> None:
        """Raise CheckpointError for a folder that this run cannot write into or resume from."""
        if self.save_freq > 0:
            self.checkpoints.require_writable()
        if self.trains and self.writes_into_folder:
            # `fit` claims the folder. Another run is reported here, before models load.
            self.checkpoints.refuse_others()
        if self.trains and self.config.trainer.resume_mode == "auto":
            newest = self.checkpoints.newest_readable()
            if newest is not None:
                require_same_run(newest, self.config)

    # ---------------------------------------------------------------- defined by a trainer

    @abstractmethod
    def step(self, prompts: DataProto) -> DataProto:
        """Train on one batch of the loader; the result goes to `step_metrics`."""

    @abstractmethod
    def step_metrics(self, batch: DataProto) -> dict[str, float]:
        """Compute timing, throughput and other metrics of a step; `self.timer` has its seconds."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Compute the metrics of the whole validation set."""

    @abstractmethod
    def checkpointed_groups(self) -> Mapping[str, GroupOf[TrainedWorker]]:
        """Return the worker groups that save something, under the names of their folders."""

    def prompt_batches(self) -> Iterable[DataProto]:
        """Return the batches of the loader's next epoch, or of a part of it, one for each step."""
        return self.train_loader

    def after_step(self, batch: DataProto) -> None:
        """Use a step's batch before validation and logging."""

    def validate_after_step(self) -> None:
        """Validate after a step for which `trainer.test_freq` asks for it."""
        self.metrics.update(self.timed("testing", self.validate))

    # ---------------------------------------------------------------- the run

    def fit(self) -> None:
        """Train to the last step, validating and saving on the way; resumes where a killed run was
        saved."""
        self.require_workers()
        started = time.perf_counter()
        with sigterm_as_exit():
            self._fit()
        show(f"Training completed in {time.perf_counter() - started:.1f}s")

    def _fit(self) -> None:
        claims = False
        try:
            claims = self.claim_folder()
            self._begin()

            while self.global_step < self.total_steps:
                for batch in self.prompt_batches():
                    self.run_step(batch)
                    if self.global_step >= self.total_steps:
                        break

            self.checkpoints.finish()
            self.log_results()
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            self.lowered_budgets.note(error)
            self.recorder.note_failure(self, error)
            self.checkpoints.rescue()
            self.log_end(error)
            self.tracker.rescue()
            raise
        else:
            self.tracker.finish()
        finally:
            self.train_loader.close()
            self.recorder.finish()
            if claims:
                self.checkpoints.release()

    def _begin(self) -> None:
        """Resume, and validate before the first step, where the configuration says so."""
        trainer = self.config.trainer
        self.warn_where_nothing_is_kept()
        with self.reports.phase("load_checkpoint"):
            self.load_checkpoint()
        self.tracker.rewind(self.global_step)
        if trainer.resume_mode != "disable":
            self.lowered_budgets.apply(self.worker_groups())
        self.recorder.start(self)
        self.warn_where_nothing_is_left()

        if self.global_step == 0 and trainer.val_before_train and self.val_loader is not None:
            with self.reports.phase("testing"):
                metrics = self.validate()
            self.tracker.log(metrics, 0)
            self.recorder.add_metrics(0, metrics)
            self.summary.add(0, metrics)

    def claim_folder(self) -> bool:
        """Refuse other runs in the folder of checkpoints, if this one writes there.

        Returns whether this call has claimed it. The caller then releases it, and a `fit` within
        the `fit` of a subclass does not.
        """
        if not self.writes_into_folder or self.checkpoints.is_claimed:
            return False
        self.checkpoints.claim()
        return True

    @property
    def writes_into_folder(self) -> bool:
        """Return whether this run writes files that another run must not write, too."""
        trainer = self.config.trainer
        return self.save_freq > 0 or "file" in trainer.logger

    def warn_where_nothing_is_kept(self) -> None:
        """Log that the trained weights end with the process, while there is time to change it."""
        if self.save_freq < 0:
            logger.warning(
                "trainer.save_freq=-1: no checkpoint is written, and the trained weights end with "
                "this process. Set trainer.save_freq=%d to keep those of the last step.",
                self.total_steps,
            )

    def warn_where_nothing_is_left(self) -> None:
        """Log that the checkpoint is already at the last step."""
        if self.global_step >= self.total_steps:
            logger.warning(
                "Nothing is left to train: step %d is done, and the run ends with step %d. Raise "
                "trainer.max_steps (total_training_steps) or total_epochs to go on; or start from "
                "the beginning with trainer.resume_mode=disable or another "
                "trainer.default_local_dir than %s.",
                self.global_step,
                self.total_steps,
                self.checkpoints.root,
            )

    def log_end(self, error: BaseException) -> None:
        """Log the step in which an error or an interrupt ended the run, and the checkpoint to resume."""
        if isinstance(error, Exception) and self.global_step == 0:
            return  # nothing has been trained yet

        # A checkpoint's step may be beyond the last step of this run.
        place = "before its first step"
        if self.has_begun:
            place = f"in step {self.global_step} of {self.total_steps}"
        newest = self.checkpoints.newest_name()
        way_on = ""
        if newest is not None and self.has_begun:
            way_on = " Started again, the run goes on from there."
            if self.config.trainer.resume_mode != "auto":
                way_on = " trainer.resume_mode=auto goes on from there."
        logger.warning(
            "%s %s. Newest checkpoint in %s: %s.%s",
            _describe_end(error),
            place,
            self.checkpoints.root,
            newest or "none",
            way_on,
        )

    def log_results(self) -> None:
        """Log the summary, where the run left its files, and commands to type next."""
        for line in (*self.summary.lines(), *last_lines(self)):
            logger.info("%s", line)

    def run_step(self, prompts: DataProto) -> None:
        """Run one step with everything around it: timing, validation, checkpoint and log."""
        if not self.has_resumed and not self.has_begun:
            refuse_to_pass_over(self)
        self.has_begun = True
        self.global_step += 1
        self.metrics = {}
        self.timer = PhaseTimer()
        batch = self.timed("step", self.step, prompts)
        self.guard_against_skipped_steps()
        self.after_step(batch)
        if self.val_loader is not None and self._is_due(self.test_freq):
            self.validate_after_step()

        self.metrics.update(self.step_metrics(batch))
        # The update has reported the peak of all ranks before its end; this process goes on.
        for name, gib in memory_metrics(self.device).items():
            self.metrics[name] = max(gib, self.metrics.get(name, 0.0))
        self.metrics["training/global_step"] = self.global_step
        self.metrics["training/epoch"] = self.train_loader.drawn_epoch
        # Logged before it is saved: a run killed in between repeats the step and rewinds the line.
        self.tracker.log(self.metrics, self.global_step)
        self.summary.add(self.global_step, self.metrics)
        self.recorder.add_step(self, batch)

        if self._is_due(self.save_freq):
            with self.reports.phase("save_checkpoint"):
                self.save_checkpoint()

    def timed(self, name: str, phase: Callable[..., Result], *args: Any) -> Result:
        """Run one phase under its name in `timing_s/*`."""
        with self.timer.phase(name), self.reports.phase(name):
            result = phase(*args)
        self.checkpoints.advance()
        return result

    def guard_against_skipped_steps(self) -> None:
        """Stop after `trainer.max_nonfinite_steps` steps in a row with a skipped update."""
        self.skipped_in_a_row += 1
        if not any(
            value for name, value in self.metrics.items() if name.endswith("/skipped_updates")
        ):
            self.skipped_in_a_row = 0

        limit = self.config.trainer.max_nonfinite_steps
        if self.skipped_in_a_row >= limit:
            raise NonFiniteError(
                f"{limit} steps in a row had a non-finite loss or gradient and were skipped; the "
                f"last is step {self.global_step}. Lower the learning rate, or look at the samples "
                "named above (trainer.max_nonfinite_steps sets how many are tolerated)."
            )

    def _is_due(self, every: int) -> bool:
        return every > 0 and (self.global_step >= self.total_steps or self.global_step % every == 0)

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(self) -> None:
        """Save everything that a resumed run needs to end with the same bits."""
        # The last one is not in the background, because no step runs during which to write it.
        in_background = self.config.trainer.async_save and self.global_step < self.total_steps
        groups = self.checkpointed_groups()
        writers: dict[str, Callable[[Path], Any]] = {}
        for role, group in groups.items():
            writers[role] = partial(group.save_checkpoint, in_background=in_background)
        writers["trainer"] = self._save_driver

        def is_written(wait: bool) -> bool:
            return all(group.checkpoint_is_written(wait=wait) for group in groups.values())

        self.checkpoints.save(self.global_step, writers, is_written if in_background else None)

    def load_checkpoint(self) -> None:
        """Go back to the newest sound checkpoint, or to the one that `trainer.resume_from_path`
        names."""
        self.has_resumed = True
        trainer = self.config.trainer
        folder = self.checkpoints.resolve(trainer.resume_mode, trainer.resume_from_path)
        if folder is None:
            return

        is_named = trainer.resume_mode == "resume_path"
        # A run that only validates writes no checkpoint that others resume from.
        check_config(folder, self.config, may_differ=is_named or not self.trains)
        state = read_state(folder / "trainer" / STATE_FILE, self.state_dict())
        for role, group in self.checkpointed_groups().items():
            group.load_checkpoint(folder / role)

        try:
            if is_named and self.trains:
                state["train_loader"] = self._position_in_data(state["train_loader"])
            self.load_state_dict(state)
        except VerlError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder / 'trainer' / STATE_FILE} does not fit this run "
                f"({describe_error(error)}). Use another checkpoint, or start from the "
                "beginning with trainer.resume_mode=disable. VERL_TRACEBACK=1 shows where it "
                "failed."
            ) from error

        log_resumed(self, folder)

    def _position_in_data(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the saved position in the training data; the first batch of another data set."""
        loader = self.train_loader
        if loader.has_rows_of(saved):
            return saved
        logger.warning(
            "The checkpoint was saved with another data set (%d rows then, %d now). Training goes "
            "on with the first batch of this one.",
            saved["num_rows"],
            len(loader.dataset),
        )
        return loader.state_dict()

    def _save_driver(self, folder: Path) -> None:
        save_state(folder / STATE_FILE, self.state_dict())
        save_config(folder, self.config)

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's own part of a checkpoint."""
        return {
            "global_step": self.global_step,
            "skipped_in_a_row": self.skipped_in_a_row,
            "train_loader": self.train_loader.state_dict(),
            "rng": rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        self.global_step = state["global_step"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        if self.trains:
            self.train_loader.load_state_dict(state["train_loader"])
        restore_rng_state(state["rng"])


def _describe_end(error: BaseException) -> str:
    """Return how the run was ended: by an error, an interrupt or `sys.exit()`."""
    if isinstance(error, Exception):
        return f"Stopped by {type(error).__name__}"
    if isinstance(error, SystemExit) and not raised_by_signal(error):
        frame = extract_tb(error.__traceback__)[-1]
        return f"Stopped by sys.exit() in line {frame.lineno} of {frame.filename}"
    return "Interrupted"
