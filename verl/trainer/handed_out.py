"""Parts of a run that `RLTrainer` hands out: metrics, a live model, the rest of a closed run."""

from dataclasses import dataclass
from typing import Any

from verl.checkpoint.manager import CheckpointManager
from verl.tracking.console import step_line
from verl.utils.errors import WorkerError


class StepMetrics(dict[str, float]):
    """The metrics of a step by name; its repr is the step's line, not a hundred entries.

    After `trainer.val_only` they are the metrics of the validation.
    """

    def __repr__(self) -> str:
        if not self:
            return "no step was trained"
        if "training/global_step" not in self:
            scores = [f"{name}: {value:.4f}" for name, value in self.items()]
            return f"no step was trained; validation: {' | '.join(scores[:6])}"
        step = self["training/global_step"]
        return f"step {step}: {step_line(self)} ({len(self)} metrics; dict(...) shows them)"


@dataclass(frozen=True)
class LiveRole:
    """A model that is trained, wherever it is."""

    name: str
    group: Any
    ranks: list[int]

    @property
    def model(self) -> Any:
        """Return the module itself. Raises WorkerError where it is not in this process alone."""
        if "worker" not in vars(self.group):
            raise WorkerError(
                f"The {self.name} is no module of this process: its weights lie on the ranks "
                f"{self.ranks}. Train in one process to have it at hand, or read it from a "
                "checkpoint (trainer.save_freq; `python -m verl.model_merger merge` makes a folder "
                "of transformers)."
            )
        return self.group.worker.engine.hf_model


@dataclass(frozen=True)
class ClosedRun:
    """The parts of a closed run that can still be read."""

    tokenizer: Any
    metrics: dict[str, float]
    checkpoints: CheckpointManager
    global_step: int
    total_steps: int
