"""The trainer: six phases, repeated for every batch of prompts."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from verl.algorithms.advantages import advantage_estimators
from verl.algorithms.kl import get_kl_controller
from verl.config import TrainConfig
from verl.config.keywords import config_from_keywords
from verl.diagnostics.parts import check_names, load_user_code
from verl.protocol import DataProto
from verl.rewards.results import call_reward
from verl.rollout.types import SamplingParams
from verl.single_controller import GroupFuture, GroupOf, OnEmit
from verl.tracking.samples import write_samples
from verl.trainer import class_checks, overlap, scored, setup
from verl.trainer.algorithm import (
    advantage_inputs,
    chosen_samples,
    corrected_rollout,
    distilled,
    entropy_controller,
    estimated_by_episode,
    penalised_scores,
)
from verl.trainer.episodes import (
    add_turn_rewards,
    agent_metrics,
    episode_rows,
    number_prompts,
    require_episodes,
    with_episodes,
    with_scores_of_episodes,
)
from verl.trainer.flat_rewards import FlatRewards
from verl.trainer.metrics import data_metrics, timing_metrics
from verl.trainer.passes import start_passes
from verl.trainer.pools import join_pool
from verl.trainer.proposer import ScheduleProposer
from verl.trainer.roles import RunOfRoles
from verl.trainer.timeline import write_timeline
from verl.trainer.updates import update_actor, update_critic
from verl.trainer.validation_pass import ValidationPass, validate_only
from verl.utils.logging import show_log
from verl.utils.phases import phase
from verl.workers import ActorWorker

# The columns that `generate` writes.
GENERATED = (
    "prompts responses input_ids attention_mask position_ids response_mask rollout_log_probs uid"
)


class PPOTrainer(RunOfRoles):
    """Train a causal LM on prompts and a reward, by PPO, GRPO or a related algorithm.

    The step is composed of the public methods `generate`, `score`, `evaluate_policies`,
    `estimate_advantages`, `update` and `sync_weights`. A new algorithm overrides the method that
    differs, or `step`, or `fit`.

    Args:
        config: a TrainConfig, its keys (nested, dotted, or a DictConfig), or the path of a YAML
            file.
        tokenizer: replaces the tokenizer that the configuration names.
        reward_fn: scores batches of responses in training, instead of the configured reward.
        val_reward_fn: scores batches of responses in validation, instead of the configured reward.
        train_dataset: rows to train on, instead of `data.train_files`.
        val_dataset: rows to validate on, instead of `data.val_files`.

    Example:
        ```python
        from verl.trainer import PPOTrainer


        class ClampedTrainer(PPOTrainer):
            def estimate_advantages(self, batch):
                batch = super().estimate_advantages(batch)
                batch.batch["advantages"] = batch.batch["advantages"].clamp(-2, 2)
                return batch


        trainer = ClampedTrainer({"data.dataset_name": "toy"})
        trainer.init_workers()
        trainer.fit()
        ```
    """

    mode: ClassVar[str] = "sync"  # the schedule: `trainer.mode` of the configurations it takes

    # A subclass that reads `old_log_probs` before the update sets this; then the pass always runs.
    reads_old_log_probs = False

    # Whether `score` takes a batch in which no response could be scored.
    rounds_may_fail: ClassVar[bool] = False

    # Whether the trained policies next to the actor are started, updated and handed over.
    trains_partners: ClassVar[bool] = False

    def __init__(
        self,
        config: Any,
        *,
        tokenizer: Any = None,
        reward_fn: Callable[..., Any] | None = None,
        val_reward_fn: Callable[..., Any] | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
    ) -> None:
        show_log()
        config = config if isinstance(config, TrainConfig) else config_from_keywords(config, {})
        super().__init__(config, setup.checkpoints_to_keep(config))
        load_user_code(config)
        check_names(config)
        class_checks.check_class(config, type(self))
        self.pool = join_pool(config, self.device)
        self.estimator = advantage_estimators.get(config.algorithm.adv_estimator)
        class_checks.check_replay(config, self.needs_old_log_probs())

        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl)
        self.entropy_controller = entropy_controller(config)
        self.tokenizer = setup.actor_tokenizer(config, tokenizer)
        setup.check_stops(config, self.tokenizer)
        setup.check_rollout_model(config, self.device)
        self.reward_fn = setup.training_reward(config, self.tokenizer, reward_fn)
        self.val_reward_fn = setup.validation_reward(config, self.tokenizer, val_reward_fn)
        self.trains = not config.trainer.val_only
        self.train_loader, self.val_loader = setup.build_loaders(
            config, self.tokenizer, train_dataset, val_dataset
        )
        if reward_fn is None:
            setup.check_reward(config, self.reward_fn, self.train_loader, self.val_loader)

        self.first_val_batch = self.val_loader.state_dict() if self.val_loader is not None else {}
        self.total_steps = setup.count_steps(config, len(self.train_loader))
        self.flat_rewards = FlatRewards(config)
        self.proposer = ScheduleProposer(config, self.pool.world_size)
        # passes over a batch, by phase
        self.begun: tuple[DataProto | None, dict[str, GroupFuture]] = None, {}

    # ---------------------------------------------------------------- the run

    @phase()
    def fit(self) -> None:
        """Train to the last step, with validation and checkpoints.

        `trainer.val_only` validates and stops.
        """
        if self.trains:
            super().fit()
        else:
            validate_only(self)
        if self.config.actor_rollout_ref.rollout.uses_agents:
            self.rollout_wg.close_agents()

    @phase()
    def run_step(self, prompts: DataProto) -> None:
        """Run one step with timing, validation, checkpoint, log and timeline.

        Args:
            prompts: (B,) prompts of the step.
        """
        super().run_step(prompts)
        self.proposer.note_metrics(self.metrics)
        if self.global_step in (self.config.trainer.profile_steps or ()):
            folder = Path(self.config.trainer.default_local_dir)
            started_ns = self.timer.started_at_ns
            write_timeline(folder, self.global_step, self.worker_groups(), started_ns)

    def after_step(self, batch: DataProto) -> None:
        """Show the step to the curriculum, watch its rewards, and write its samples."""
        self.train_loader.update_sampler(batch)
        has_reward = not self.config.distillation.is_whole_loss
        self.metrics.update(data_metrics(batch, has_reward=has_reward))
        self.metrics.update(agent_metrics(batch))
        self.flat_rewards.watch(batch, self.global_step)
        self.proposer.note_lengths(batch)
        self.write_rollouts(batch)

    def step_metrics(self, batch: DataProto) -> dict[str, float]:
        return timing_metrics(batch, self.timer.seconds, num_devices=self.pool.world_size)

    @phase()
    def step(self, prompts: DataProto) -> DataProto:
        """Run the six phases of one step in their order.

        Args:
            prompts: (B,) prompts from the loader.

        Returns:
            The batch of responses that was learned from.
        """
        batch = self.collect(prompts)
        batch = self.evaluate_policies(batch)
        batch = self.timed("adv", self.estimate_advantages, batch)
        self.update(batch)
        self.timed("sync_weights", self.sync_weights)
        return batch

    # ---------------------------------------------------------------- the phases

    @phase(writes=GENERATED + " token_level_scores rm_scores")
    def collect(self, prompts: DataProto, first_row: int = 0) -> DataProto:
        """Make trajectories with scores: `generate`, then `score`.

        Args:
            prompts: (B,) prompts.
            first_row: number of the first prompt within its step, see `generate`.
        """
        n = self.config.actor_rollout_ref.rollout.n
        with self.scoring_ahead(self.reward_fn, prompts, n, first_row) as on_emit:
            # A `generate` that replaces ours may not take it.
            own = () if on_emit is None else (on_emit,)
            batch = self.timed("gen", self.generate, prompts, first_row, *own)
            self.begin_passes(batch)
            return self.timed("reward", self.score, batch)

    def scoring_ahead(
        self, reward_fn: Any, prompts: DataProto, n: int, first_row: int = 0
    ) -> AbstractContextManager[OnEmit]:
        """Score responses as they finish, where no answer can depend on that.

        Gives the function that takes every response, or None.
        """
        if overlap.may_score_ahead(type(self), self.config, reward_fn):
            return reward_fn.ahead(prompts, n, first_row * n)
        return nullcontext()

    @phase(writes=GENERATED)
    def generate(self, prompts: DataProto, first_row: int = 0, on_emit: OnEmit = None) -> DataProto:
        """Turn (B,) prompts into (B * n,) trajectories, or more if episodes of agents have parts.

        The rows of a prompt are adjacent and share its `uid`.

        Args:
            prompts: (B,) prompts.
            first_row: number of the first prompt. A step that generates several times numbers all
                its prompts, because the noise depends on the number.
            on_emit: called with every response when it is finished.
        """
        rollout = self.config.actor_rollout_ref.rollout
        draw = setup.sampling_params(rollout)
        batch = self._generate(
            prompts, rollout.n, draw, rollout.seed, self.global_step, first_row, on_emit=on_emit
        )
        self.metrics.update(batch.meta_info.pop("metrics", {}))
        require_episodes(batch, rollout)
        return batch

    @phase(writes=GENERATED)
    def _generate(
        self,
        prompts: DataProto,
        n: int,
        params: SamplingParams,
        seed: int,
        step: int,
        first_row: int = 0,
        record_step: int | None = None,
        **call: Any,
    ) -> DataProto:
        number_prompts(prompts, step, first_row)
        self.weights.provide()
        call |= {"n": n, "params": params, "seed": seed, "step": step}
        drawn = self.generation_call(step if record_step is None else record_step)(prompts, **call)
        return self.with_prompts(prompts, drawn, n)

    def generation_call(self, record_step: int) -> Callable[..., DataProto]:
        """Return the rollout's method that generates: by agent loops, or one response a sample."""
        if self.config.actor_rollout_ref.rollout.uses_agents:
            return partial(self.rollout_wg.play_episodes, record_step=record_step)
        return self.rollout_wg.generate_sequences

    def with_prompts(
        self, prompts: DataProto, drawn: DataProto, n: int, rows: Sequence[int] | None = None
    ) -> DataProto:
        """Put the columns of the prompts next to the trajectories of a `generation_call`.

        `rows` number the prompts, see `with_episodes`.
        """
        rollout = self.config.actor_rollout_ref.rollout
        if rollout.uses_agents:
            return with_episodes(prompts, drawn, n, rows, gives_reward=rollout.agent.gives_reward)
        return prompts.repeat(n, interleave=True).union(drawn)

    @phase(reads="prompts responses attention_mask rm_scores", writes="token_level_scores")
    def score(self, batch: DataProto) -> DataProto:
        """Add `token_level_scores`, and the further columns that the reward returns.

        Args:
            batch: (B * n,) trajectories of `generate`.
        """
        result = call_reward(self.reward_fn, self.add_rm_scores(batch))
        scored.record_scores(batch, result, may_fail=self.rounds_may_fail)
        with_scores_of_episodes(batch)
        if self.config.algorithm.turn_rewards:
            add_turn_rewards(batch)
        rows = episode_rows(batch)
        counted = None if rows is None else rows.last.tolist()
        self.metrics.update(scored.reward_metrics(result, counted))
        return batch

    @phase(reads="prompts responses attention_mask", writes="rm_scores")
    def add_rm_scores(self, batch: DataProto) -> DataProto:
        """Add `rm_scores` if a reward model is configured; reward managers use them as scores."""
        if self.rm_wg is not None:
            scores = self.timed("rm", self.rm_wg.compute_rm_score, batch)
            batch.batch["rm_scores"] = scores.batch["rm_scores"]
        return batch

    @phase(reads=GENERATED, writes="old_log_probs entropys ref_log_prob values")
    def evaluate_policies(self, batch: DataProto) -> DataProto:
        """Add old and reference log-probs and values, if something reads them.

        Passes run at the same time where their workers have devices of their own.

        Args:
            batch: scored trajectories.
        """
        if self.config.algorithm.rollout_correction.bypass_mode:
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]

        begun_for, passes = self.begun
        if begun_for is not batch:
            passes = self._start_passes(batch)
        self.begun = None, {}

        for name, answer in passes.items():
            columns = self.timed(name, answer.result)
            self.metrics.update(columns.meta_info.pop("metrics", {}))
            batch = batch.union(columns)
        return batch

    def begin_passes(self, batch: DataProto) -> None:
        """Start the passes of `evaluate_policies` early, to run while the reward is computed.

        Does nothing if a phase is replaced by an undeclared one or the reward may change the batch.
        """
        if overlap.may_begin_passes(type(self), self.config, self.reward_fn):
            # the columns of now, whatever is added meanwhile
            self.begun = batch, self._start_passes(batch.select())

    def _start_passes(self, batch: DataProto) -> dict[str, GroupFuture]:
        return start_passes(self, batch, with_old_log_probs=self.needs_old_log_probs())

    def needs_old_log_probs(self) -> bool:
        """Return whether a pass for the old log-probs is needed.

        That is `TrainConfig.needs_old_log_probs`, and True wherever a user's own code between the
        rollout and the update may read them.
        """
        if self.config.algorithm.rollout_correction.needs_no_pass:
            return False
        if self.config.needs_old_log_probs or self.reads_old_log_probs:
            return True
        return overlap.may_read_old_log_probs(type(self), self.estimator)

    @phase(
        reads="token_level_scores response_mask ref_log_prob values uid",
        writes="token_level_rewards advantages returns",
    )
    def estimate_advantages(self, batch: DataProto) -> DataProto:
        """Add `token_level_rewards` (scores less the KL penalty), `advantages` and `returns`.

        Args:
            batch: scored trajectories with the log-probs and values of `evaluate_policies`.
        """
        scored.require_floats(batch, "token_level_scores", "score")
        columns = batch.batch
        columns["token_level_rewards"], metrics = penalised_scores(
            batch, self.config, self.kl_controller
        )
        self.metrics.update(metrics)
        inputs = advantage_inputs(batch, self.config)
        advantages, columns["returns"] = estimated_by_episode(
            self.estimator, self.config, inputs, episode_rows(batch)
        )
        columns["advantages"], metrics = distilled(advantages, batch, self.config)
        self.metrics.update(metrics)
        return batch

    @phase(reads=GENERATED + " advantages returns ref_log_prob values")
    def update(self, batch: DataProto) -> None:
        """Update the critic, then the actor.

        The first `trainer.critic_warmup` steps update the critic alone.

        Args:
            batch: trajectories with `advantages` and `returns`.
        """
        scored.require_floats(batch, "advantages", "estimate_advantages")
        chosen = chosen_samples(batch, self.config, self.global_step)
        if self.critic_wg is not None:
            metrics = self.timed(
                "update_critic", update_critic, self.critic_wg, chosen, batch, self.config
            )
            self.metrics.update(metrics)

        if self.global_step > self.config.trainer.critic_warmup:
            chosen = self.correct_rollout(chosen)
            self.metrics.update(self.update_policy(self.actor_wg, chosen, batch))
            self.entropy_controller.update(self.metrics["actor/entropy"])

    def update_policy(
        self, actor: GroupOf[ActorWorker], batch: DataProto, played: DataProto
    ) -> dict[str, float]:
        """Update the actor or another trained policy; see `updates.update_actor`."""
        coeff = self.entropy_controller.value
        return self.timed("update_actor", update_actor, actor, batch, played, self.config, coeff)

    def correct_rollout(self, batch: DataProto) -> DataProto:
        """Weigh or reject rows as `algorithm.rollout_correction` says, before the update."""
        batch, metrics = corrected_rollout(batch, self.config)
        self.metrics.update(metrics)
        return batch

    def sync_weights(self) -> None:
        """Hand the updated weights over to the rollout engine."""
        self.weights.sync()

    # ---------------------------------------------------------------- around the phases

    def validate(self) -> dict[str, float]:
        """Return scores of the whole validation set, per data source.

        Episodes that failed are counted as `val-aux/dropped_episodes`; no score has them. Samples
        go to `trainer.validation_data_dir` and to the trackers.
        """
        assert self.val_loader is not None
        validation = ValidationPass(self, self.global_step)
        for number, prompts in validation.batches():
            self.reports.note(number, len(self.val_loader), "batches")
            draw = validation.draw(number)
            with self.scoring_ahead(self.val_reward_fn, prompts, draw["n"]) as on_emit:
                record_step = validation.record_step(number)
                batch = self._generate(prompts, **draw, record_step=record_step, on_emit=on_emit)
                validation.score(batch)
        return validation.result()

    def write_rollouts(self, batch: DataProto) -> None:
        """Write the batch as JSON lines if `trainer.rollout_data_dir` is set."""
        folder = self.config.trainer.rollout_data_dir
        if folder:
            rows = scored.recorded_rows(batch, self.tokenizer, self.config)
            write_samples(Path(folder), self.global_step, rows)

    def load_checkpoint(self) -> None:
        """Go back to a checkpoint, see `TrainingRun.load_checkpoint`, and hand its weights over."""
        super().load_checkpoint()
        self.sync_weights()

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's own part of a checkpoint."""
        return super().state_dict() | {
            "kl_controller": self.kl_controller.state_dict(),
            "entropy_controller": self.entropy_controller.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        super().load_state_dict(state)
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.entropy_controller.load_state_dict(state["entropy_controller"])


# The name under which users' recipes subclass it.
RayPPOTrainer = PPOTrainer
