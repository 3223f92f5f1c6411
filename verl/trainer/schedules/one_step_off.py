"""One-step-off training: the rollout generates the next batch while the actor learns from this one.

A step waits for its batch, hands the weights over, begins the next batch with them, and then
learns. Every token is so one version old. It pays where the rollout has ranks of its own
(`trainer.placement.rollout`).
"""

from typing import Any

from verl.protocol import DataProto
from verl.single_controller import GroupFuture, OnEmit, start
from verl.trainer import setup
from verl.trainer.episodes import number_episodes, number_prompts, require_episodes
from verl.trainer.ppo_trainer import GENERATED
from verl.trainer.schedules.ahead import AheadTrainer
from verl.trainer.schedules.packing import packed, unpacked
from verl.utils.phases import phase


class OneStepOffTrainer(AheadTrainer):
    """PPOTrainer with `trainer.mode=one_step_off`: the phases are the same, `generate` differs."""

    mode = "one_step_off"

    def __init__(self, config: Any, **parts: Any) -> None:
        super().__init__(config, **parts)
        # The next batch: while it is generated, its prompts and the answer to come; then itself.
        self.coming: tuple[DataProto, GroupFuture[DataProto]] | None = None
        self.ahead: DataProto | None = None

    @phase(writes=GENERATED)
    def generate(self, prompts: DataProto, first_row: int = 0, on_emit: OnEmit = None) -> DataProto:
        """Return the batch that was generated during the last step, and begin the next one.

        Args:
            prompts: of the step after this one; usually none, and read here.
            first_row: prompts of earlier rounds of this step. A further round has the batch that
                the round before began, with the weights of this step.
        """
        is_first = first_row == 0
        if self.ahead is None and self.coming is None:
            self.weights.provide()
            step = self.global_step if is_first else self.global_step + 1
            self._begin_rollout(step, DataProto(), first_row)
        self._wait_for_generation()
        batch = self.ahead
        assert batch is not None
        self.ahead = None

        if is_first:
            self.timed("sync_weights", self.weights.sync)
        if self.global_step < self.total_steps:
            self._begin_rollout(self.global_step + 1, prompts, first_row)
        if self.validation_due and self.validation is None:
            self.begin_validation()
        self.metrics.update(batch.meta_info.pop("metrics", {}))
        rollout = self.config.actor_rollout_ref.rollout
        require_episodes(batch, rollout)
        number_episodes(batch, first_row * rollout.n)
        return batch

    def sync_weights(self) -> None:
        """End the validation in flight, before `generate` hands new weights over."""
        if self.validation is not None:
            self.timed("testing", self.finish_validation)

    def validate(self) -> dict[str, float]:
        """Validate with the present weights, once the rollout has generated the next batch."""
        self._wait_for_generation()
        self.weights.sync()
        return super().validate()

    def _begin_rollout(self, step: int, prompts: DataProto, first_row: int) -> None:
        """Begin to generate a batch, whose prompts are numbered in `step` from `first_row`."""
        if not len(prompts):
            prompts = next(iter(self.train_loader))
        rollout = self.config.actor_rollout_ref.rollout
        number_prompts(prompts, step, first_row)
        answer = start(
            self.generation_call(step),
            prompts,
            n=rollout.n,
            params=setup.sampling_params(rollout),
            seed=rollout.seed,
            step=step,
        )
        self.coming = prompts, answer

    def _wait_for_generation(self) -> None:
        """Wait until the rollout has generated the next batch, if it has begun."""
        if self.coming is not None:
            prompts, answer = self.coming
            n = self.config.actor_rollout_ref.rollout.n
            self.ahead = self.with_prompts(prompts, answer.result(), n)
            self.coming = None

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's own part of a checkpoint, with the batch that is there already."""
        self._wait_for_generation()
        return super().state_dict() | {"ahead": packed(self.ahead)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        super().load_state_dict(state)
        self.ahead = unpacked(state["ahead"])
