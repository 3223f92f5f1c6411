"""One pass over the validation set: batches of prompts, their scores, and the metrics of all."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.protocol import DataProto
from verl.rewards.results import call_reward
from verl.tracking.samples import samples_file, write_samples
from verl.trainer import scored, setup
from verl.trainer.episodes import (
    environment_metrics,
    turn_metrics,
    whole_episodes,
    without_failed,
)
from verl.trainer.validation import validation_metrics
from verl.utils.logging import logger

if TYPE_CHECKING:
    from verl.trainer.ppo_trainer import PPOTrainer

_MOST_BATCHES = 1_000_000  # of a validation


class ValidationPass:
    """Collects the scores of the whole validation set.

    Args:
        trainer: has the rows, and the reward.
        step: the training step after which the rollout got its weights.
    """

    def __init__(self, trainer: "PPOTrainer", step: int) -> None:
        self.step = step
        self._trainer = trainer
        self._rows: list[dict[str, Any]] = []
        self._failures: list[str] = []
        self._turns: list[int] = []  # of episodes that agents played
        self._infos: list[Mapping[str, Any]] = []  # likewise

    def batches(self) -> Iterator[tuple[int, DataProto]]:
        """Read the validation set from its beginning, in numbered batches."""
        loader = self._trainer.val_loader
        assert loader is not None
        loader.load_state_dict(self._trainer.first_val_batch)
        yield from enumerate(loader)

    def draw(self, number: int) -> dict[str, Any]:
        """Return the arguments that generate for the batch `number`.

        A seed of its own and a step that counts batches: the same rows meet the same noise at every
        validation.
        """
        rollout = self._trainer.config.actor_rollout_ref.rollout
        return {
            "n": rollout.val_kwargs.n,
            "params": setup.validation_params(rollout),
            "seed": rollout.seed + 1,
            "step": number,
        }

    def record_step(self, number: int) -> int:
        """Return the number of a batch within the run, for agents: below 0, and each once."""
        return -(self.step * _MOST_BATCHES + number + 1)

    def score(self, batch: DataProto) -> None:
        """Score the trajectories of a batch. Episodes that failed get no score."""
        trainer = self._trainer
        batch, failed = without_failed(whole_episodes(batch))
        self._failures += failed
        if not len(batch):
            return
        self._turns += list(batch.non_tensor_batch.get("num_turns", ()))
        self._infos += list(batch.non_tensor_batch.get("agent_info", ()))
        if not _has_rule(batch):
            batch = trainer.add_rm_scores(batch)
        result = call_reward(trainer.val_reward_fn, batch)
        batch.batch["token_level_scores"] = result["reward_tensor"]
        self._rows += scored.scored_rows(batch, trainer.tokenizer, result, trainer.config)

    def result(self) -> dict[str, float]:
        """Return the metrics. Samples go to `trainer.validation_data_dir` and to the trackers."""
        rows = self._rows
        if not rows:
            raise scored.nothing_scored("the validation", self._failures)
        options = self._trainer.config.trainer
        if options.validation_data_dir:
            write_samples(Path(options.validation_data_dir), self.step, rows)
        if options.log_val_generations > 0:
            shown = rows[: options.log_val_generations]
            self._trainer.tracker.log_generations(shown, self.step)

        metrics = validation_metrics(
            [row["data_source"] for row in rows],
            [row["uid"] for row in rows],
            [row["score"] for row in rows],
            [scored.vote(row.get("pred")) for row in rows],
            scored.fields_of(rows),
        )
        of_agents = turn_metrics(self._turns) | environment_metrics(self._infos)
        for name, value in of_agents.items():
            metrics[f"val-aux/{name}"] = value
        if self._failures:
            metrics["val-aux/dropped_episodes"] = float(len(self._failures))
        return metrics


def validate_only(run: "PPOTrainer") -> None:
    """Validate the weights of the newest checkpoint, or those of the model, without training."""
    trainer = run.config.trainer
    run.require_workers()
    try:
        run.load_checkpoint()
        if run.global_step == 0 and trainer.resume_mode != "disable":
            logger.info(
                "No checkpoint in %s: actor_rollout_ref.model.path is validated as it is.",
                run.checkpoints.root,
            )
        with run.reports.phase("testing"):
            metrics = run.validate()
        run.metrics = metrics
        run.tracker.log(metrics, run.global_step)
    except (Exception, KeyboardInterrupt, SystemExit):
        run.tracker.rescue()
        raise
    run.tracker.finish()

    if trainer.validation_data_dir:
        logger.info("Samples: %s", samples_file(trainer.validation_data_dir, run.global_step))


def _has_rule(batch: DataProto) -> bool:
    """Check whether the rows have a ground truth for a rule, not in the style "model"."""
    truths = batch.non_tensor_batch.get("reward_model", ())
    return len(truths) > 0 and all(
        isinstance(truth, Mapping) and truth.get("style") != "model" for truth in truths
    )
