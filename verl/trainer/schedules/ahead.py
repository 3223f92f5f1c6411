"""The parts that asynchronous schedules share, among them validation during training.

With `trainer.dynamic_validation` the rollout's ranks validate the weights after step S during step
S + 1, between the hand-over of these weights and the next one. So at most one validation is in
flight, none is when a checkpoint is written, and the samples are those of a validation for which
the trainer waits.
"""

from collections.abc import Iterable
from itertools import repeat
from typing import Any

from verl.protocol import DataProto
from verl.single_controller import GroupFuture, start
from verl.tracking import WRITTEN_IN_STEP
from verl.trainer.dapo import DAPOTrainer
from verl.trainer.episodes import number_prompts
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.run import TrainingRun
from verl.trainer.validation_pass import ValidationPass
from verl.utils.errors import ConfigError


class AheadTrainer(PPOTrainer):
    """PPOTrainer whose `generate` returns responses of earlier steps."""

    def __init__(self, config: Any, **parts: Any) -> None:
        super().__init__(config, **parts)
        if self.config.algorithm.filter_groups.enable and not isinstance(self, DAPOTrainer):
            raise ConfigError(
                f"algorithm.filter_groups.enable=True with trainer.mode={self.mode} needs a "
                f"trainer of verl.trainer.schedules.dynamic_sampling, got {type(self).__name__}."
            )
        self.validation_due = 0  # step whose weights are validated next; 0: none
        self.validation: ValidationPass | None = None  # in flight
        self._drawn: list[tuple[DataProto, GroupFuture[DataProto]]] = []

    def prompt_batches(self) -> Iterable[DataProto]:
        """Return no prompts: `generate` reads as many as it needs."""
        return repeat(DataProto())

    def validate_after_step(self) -> None:
        """Validate now, or during the next step if there is one and the configuration says so."""
        is_last = self.global_step >= self.total_steps
        if is_last or not self.config.trainer.dynamic_validation:
            super().validate_after_step()
        else:
            self.validation_due = self.global_step

    def begin_validation(self) -> None:
        """Ask the rollout to draw the validation that is due, after the calls that it has already.

        Its weights must be those of that step, and its engines idle by then. Later calls wait.
        """
        self.validation = ValidationPass(self, self.validation_due)
        for number, prompts in self.validation.batches():
            number_prompts(prompts, number)
            generate = self.generation_call(self.validation.record_step(number))
            self._drawn.append((prompts, start(generate, prompts, **self.validation.draw(number))))

    def wait_for_validation(self) -> None:
        """Wait until the rollout has drawn the validation in flight."""
        for _, answer in self._drawn:
            answer.result()

    def finish_validation(self) -> None:
        """Score the validation that the rollout has drawn, and log it at its own step."""
        validation = self.validation
        assert validation is not None
        samples = self.config.actor_rollout_ref.rollout.val_kwargs.n
        for prompts, answer in self._drawn:
            validation.score(self.with_prompts(prompts, answer.result(), samples))
        self._drawn = []
        self.validation = None
        self.validation_due = 0

        metrics = {**validation.result(), WRITTEN_IN_STEP: float(self.global_step)}
        self.tracker.log(metrics, validation.step)
        self.recorder.add_metrics(validation.step, metrics)
        self.summary.add(validation.step, metrics)

    # ---------------------------------------------------------------- checkpoints

    def load_checkpoint(self) -> None:
        """Go back to a checkpoint; see `TrainingRun.load_checkpoint`.

        The engines get its weights, also between two hand-overs: their tokens then count as older
        than they are.
        """
        TrainingRun.load_checkpoint(self)
        self.weights.sync()

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's own part of a checkpoint, with a validation that is due."""
        due = {"validation_due": self.validation_due} if self.validation_due else {}
        return super().state_dict() | due

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        super().load_state_dict(state)
        self.validation_due = state.get("validation_due", 0)
