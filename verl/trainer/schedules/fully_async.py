"""Fully asynchronous training: generation runs ahead of the updates, within a bound.

A step takes whole groups from the books (`book`) instead of generating its own. On shared devices
generation and update take turns: unfinished responses are frozen while the device is the trainer's,
and go on under the new weights from where they were. A rollout on ranks of its own goes on
generating while the trainer learns, and is interrupted for the hand-over of weights alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl.config import RolloutConfig
from verl.config.placement import rollout_is_apart
from verl.models.load import load_model_config
from verl.protocol import DataProto
from verl.rollout import Trajectory, assemble
from verl.rollout.base import capabilities_of
from verl.rollout.book import Book, Group, Pace, State
from verl.single_controller import OnEmit
from verl.trainer import setup
from verl.trainer.episodes import number_prompts, require_episodes
from verl.trainer.ppo_trainer import GENERATED
from verl.trainer.schedules.ahead import AheadTrainer
from verl.trainer.schedules.generation import EpisodeGeneration, Generation, prompt_ids_of
from verl.trainer.schedules.packing import packed, unpacked
from verl.trainer.schedules.staleness import (
    apply_policy,
    book_metrics,
    staleness_metrics,
    with_staleness_weights,
)
from verl.utils.errors import CheckpointError, ConfigError, DataError, RolloutError
from verl.utils.logging import logger
from verl.utils.phases import phase
from verl.workers.playing import episode_columns
from verl.workers.trained import model_source


class FullyAsyncTrainer(AheadTrainer):
    """PPOTrainer with `trainer.mode=fully_async`: the phases are the same, `generate` differs.

    With `async_training.staleness_threshold=0` nothing runs ahead, and every bit is that of the
    synchronous run.
    """

    mode = "fully_async"

    def __init__(self, config: Any, **parts: Any) -> None:
        super().__init__(config, **parts)
        options = self.config.async_training
        rollout = self.config.actor_rollout_ref.rollout
        if not capabilities_of(rollout.name).continues:
            raise ConfigError(
                "trainer.mode=fully_async needs an engine that goes on with frozen responses, got "
                f"actor_rollout_ref.rollout.name={rollout.name}. Set name=embedded, or "
                "trainer.mode=one_step_off."
            )
        groups = self.config.data.train_batch_size
        pace = Pace(
            groups_per_step=groups,
            max_staleness=options.bound,
            steps_per_version=options.trigger_parameter_sync_step,
            total_steps=self.total_steps,
            max_started=options.most_started(groups),
            is_bound=options.on_stale == "wait",
            is_partial=options.partial_rollout,
        )
        self.book = Book(pace, rollout.n)
        self.is_apart = rollout_is_apart(self.config)

    def init_workers(self) -> None:
        """Load the models, see `PPOTrainer.init_workers`, and connect books with engines."""
        super().init_workers()
        rollout = self.config.actor_rollout_ref.rollout
        params = setup.sampling_params(rollout)
        how = EpisodeGeneration if rollout.uses_agents else Generation
        model = load_model_config(**model_source(self.config.actor_rollout_ref.model))
        self.vocabulary: int = model.get_text_config().vocab_size
        self.generation: Generation = how(
            self.book,
            self.rollout_wg,
            params,
            rollout.seed,
            keep_kv_cache=self.config.async_training.keep_kv_cache,
        )

    # ---------------------------------------------------------------- prompts

    def admit(self, prompts: DataProto, first_row: int = 0) -> None:
        """Enter a batch of prompts in the books.

        Args:
            first_row: of the prompts in their batch; above 0: the batch that was read last goes on.
        """
        groups = self.book.pace.groups_per_step
        if len(prompts) != groups:
            raise DataError(
                f"Expected batches of data.train_batch_size={groups} prompts, got {len(prompts)}."
            )
        step = self.book.last_batch + (first_row == 0)
        number_prompts(prompts, step, first_row)
        for row in range(groups):
            self.book.admit(step, first_row + row, prompts.slice(row, row + 1))

    # ---------------------------------------------------------------- the phases that differ

    @phase(writes=GENERATED)
    def generate(self, prompts: DataProto, first_row: int = 0, on_emit: OnEmit = None) -> DataProto:
        """Generate until a batch of groups is whole, and return it.

        Args:
            prompts: read in addition to those that this reads itself; usually none.
        """
        groups, batch = self.take_groups(prompts, first_row)
        self.note_batch(batch, groups)
        return batch

    def take_groups(self, prompts: DataProto, first_row: int) -> tuple[list[Group], DataProto]:
        """Generate until enough groups are whole; return them, and their trajectories."""
        if len(prompts):
            self.admit(prompts, first_row)
        self.weights.provide()
        self._generate_a_batch()

        groups = self.book.take()
        if self.validation_due and self.validation is None:
            self.generation.freeze()
            self.begin_validation()
        if self.is_apart:
            self._read_prompts()
            self.generation.run_ahead()
        batch = self._batch_of(groups, first_row)
        apply_policy(batch, self.config.async_training)
        return groups, batch

    def note_batch(self, batch: DataProto, groups: Sequence[Group]) -> None:
        """Measure the batch of a step, and check that there are tokens to learn from."""
        self.metrics.update(staleness_metrics(batch, groups, self.config.async_training))
        require_episodes(batch, self.config.actor_rollout_ref.rollout)

    def correct_rollout(self, batch: DataProto) -> DataProto:
        """Weigh or reject rows, see `PPOTrainer.correct_rollout`; weigh down tokens beyond the
        bound."""
        return with_staleness_weights(super().correct_rollout(batch))

    def sync_weights(self) -> None:
        """Hand the weights over, after every `async_training.trigger_parameter_sync_step`-th
        step."""
        if self.validation is not None:
            self.timed("testing", self._end_validation)
        self.generation.pause()
        if self.global_step % self.book.pace.steps_per_version == 0:
            self.generation.freeze()
            self.weights.sync()
            self.book.hand_over()

    def _end_validation(self) -> None:
        """Score the validation in flight, while a rollout on ranks of its own goes on."""
        self.generation.pause()
        self.wait_for_validation()
        if self.is_apart:
            self.generation.run_ahead()
        self.finish_validation()

    def validate(self) -> dict[str, float]:
        """Validate with the weights of the rollout; see `PPOTrainer.validate`."""
        self.generation.freeze()
        return super().validate()

    def after_step(self, batch: DataProto) -> None:
        """Add the engines' metrics and the state of the books; see `PPOTrainer.after_step`."""
        super().after_step(batch)
        self.metrics.update(self.generation.metrics)
        self.generation.metrics = {}
        self.metrics.update(book_metrics(self.book))

    def step_metrics(self, batch: DataProto) -> dict[str, float]:
        """Add the shares of the step in which trainer and rollout waited for each other."""
        metrics = super().step_metrics(batch)
        if self.is_apart:
            step_s = self.timer.seconds["step"]
            metrics["trainer/idle_ratio"] = self.timer.seconds["gen"] / step_s
            metrics["rollouter/idle_ratio"] = max(0.0, 1 - self.generation.seconds / step_s)
        self.generation.seconds = 0.0
        return metrics

    def _generate_a_batch(self) -> None:
        """Generate until the next batch can be taken. Samples in shared devices are frozen then."""
        self._discard()
        while not self.book.can_take():
            self._start_samples()
            if not self.generation.is_running:
                raise RolloutError(
                    f"Step {self.global_step} needs {self.book.missing} prompts with "
                    f"whole groups, and none is left to generate: {self.book.counts()}. The run "
                    f"reads prompts for {self.total_steps} steps."
                )
            self.generation.advance()
            self._discard()
        if not self.is_apart:
            self.generation.leave_device()

    def _start_samples(self) -> None:
        """Read prompts, and submit all samples that may run."""
        self._read_prompts()
        self.generation.start()

    def _read_prompts(self) -> None:
        """Enter as many prompts in the books as may start."""
        while self.book.wanted() > 0:
            self.admit(next(iter(self.train_loader)))

    def _discard(self) -> None:
        if self.config.async_training.on_stale == "drop":
            self.book.discard_stale()

    def _batch_of(self, groups: Sequence[Group], first_row: int) -> DataProto:
        """Return the columns of phase "generate" of whole groups.

        Args:
            first_row: number of the first group within its step.
        """
        rollout = self.config.actor_rollout_ref.rollout
        trajectories = self._trajectories_of(groups, first_row)
        columns = assemble(
            trajectories,
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            pad_token_id=self.tokenizer.pad_token_id,
            with_turns=rollout.uses_agents,
            version=self.book.pace.version_of(self.global_step),
            vocabulary=self.vocabulary,
        )
        objects = None
        if rollout.uses_agents:
            has_pictures = any(each.pictures for each in trajectories)
            objects = episode_columns(trajectories, has_pictures)

        prompts = DataProto.concat([group.payload for group in groups])
        drawn = DataProto.from_dict(tensors=columns, non_tensors=objects)
        rows = range(first_row, first_row + len(groups))
        return self.with_prompts(prompts, drawn, self.book.num_samples, rows)

    def _trajectories_of(self, groups: Sequence[Group], first_row: int) -> list[Trajectory]:
        """Return the trajectories of whole groups, numbered by their place in the step."""
        trajectories: list[Trajectory] = []
        row = first_row * self.book.num_samples
        for group in groups:
            prompt_ids = prompt_ids_of(group)
            for sample in group.samples:
                if self.config.actor_rollout_ref.rollout.uses_agents:
                    trajectories += [replace(each, row=row) for each in sample.trajectories]
                else:
                    drawn = Trajectory(row=row, prompt_ids=prompt_ids, segments=sample.segments)
                    trajectories.append(drawn)
                row += 1
        return trajectories

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's own part of a checkpoint, with the books and their prompts."""
        self.generation.freeze()
        self.generation.forget_kept()
        prompts = None
        if self.book.groups:
            prompts = DataProto.concat([group.payload for group in self.book.groups])
        return super().state_dict() | {"book": self.book.state_dict(), "prompts": packed(prompts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        super().load_state_dict(state)
        _check_saved(state["book"]["groups"], self.config.actor_rollout_ref.rollout)
        prompts = unpacked(state["prompts"]) or DataProto()
        payloads = [prompts.slice(row, row + 1) for row in range(len(prompts))]
        self.book.load_state_dict(state["book"], payloads)
        if self.book.next_step <= self.global_step:
            self.book.begin_after(self.global_step)
        if self.book.replayed_episodes:
            logger.info(
                "resume: half-played episodes of agents cannot be saved, so they begin anew: %d in "
                "this run so far.",
                self.book.replayed_episodes,
            )

        options = self.config.async_training
        late = self.book.num_late()
        if late and options.on_stale == "wait":
            logger.warning(
                "resume: %d of the prompts in the books will be learned from later than "
                "async_training.max_staleness=%d allows, since this run has a lower bound or a "
                "smaller batch than the one that drew them. Set it as it was, or leave such tokens "
                "out with async_training.on_stale=mask.",
                late,
                options.bound,
            )


def _check_saved(groups: Sequence[dict[str, Any]], rollout: RolloutConfig) -> None:
    """Raise CheckpointError for saved groups that this configuration cannot go on with."""
    for group in groups:
        num_samples = len(group["samples"])
        if num_samples != rollout.n:
            raise _other_samples(f"rollout.n={rollout.n}", f"n={num_samples}")

        for state, segments, trajectories in group["samples"]:
            num_tokens = sum(len(token_ids) for _, token_ids, _ in segments)
            is_frozen = state == State.FROZEN.value
            if num_tokens + is_frozen > rollout.response_length:
                given = f"rollout.response_length={rollout.response_length}"
                raise _other_samples(given, f"{num_tokens} tokens in one of them")
            if trajectories and not rollout.uses_agents:
                raise _other_samples("rollout without agents", "agents")
            if segments and rollout.uses_agents:
                raise _other_samples("rollout with agents", "no agents")


def _other_samples(now: str, then: str) -> CheckpointError:
    return CheckpointError(
        "The checkpoint holds responses that no step has learned from yet, and this run cannot go "
        f"on with them: actor_rollout_ref.{now} now, {then} then. Set it as it was, or begin anew "
        "with trainer.resume_mode=disable."
    )
