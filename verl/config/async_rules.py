"""Contradictions between the keys of asynchronous training, and its defaults. See `rules`."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.config.async_training import AsyncTrainingConfig
from verl.config.placement import rollout_is_apart
from verl.config.train import TrainConfig
from verl.utils.logging import logger

_CORRECTION = "algorithm.rollout_correction."
_BYPASS = _CORRECTION + "bypass_mode"


def with_async_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` (flat, aliases renamed), with a correction where tokens may be stale.

    Without one the ratio would be against the current policy, 1 for every token, and hide that
    older weights drew it.
    """
    mode = given.get("trainer.mode", "sync")
    is_stale = mode == "one_step_off"
    if mode == "fully_async":
        asked = AsyncTrainingConfig()
        is_stale = _may_be_stale(
            given.get("async_training.staleness_threshold", asked.staleness_threshold),
            given.get("async_training.max_staleness"),
            given.get("async_training.on_stale", asked.on_stale),
        )
    chosen = [key for key in given if key.startswith(_CORRECTION)]
    if not is_stale or chosen:
        return dict(given)
    logger.info(
        "trainer.mode=%s sets %s=True: the ratio of the policy loss is against the weights that "
        "drew each token. Any key of algorithm.rollout_correction replaces that.",
        mode,
        _BYPASS,
    )
    return {**given, _BYPASS: True}


def _may_be_stale(threshold: float, most: int | None, on_stale: str) -> bool:
    """Return whether tokens may be learned from that older weights drew."""
    return threshold != 0 and (most != 0 or on_stale != "wait")


def schedule_is_possible(config: TrainConfig) -> Iterator[str]:
    mode = config.trainer.mode
    algorithm = config.algorithm
    if mode == "sync":
        return

    if algorithm.filter_groups.enable or algorithm.adv_estimator == "remax":
        which = "algorithm.filter_groups.enable=True"
        if algorithm.adv_estimator == "remax":
            which = "algorithm.adv_estimator=remax"
        yield (
            f"trainer.mode={mode} generates before it is known which prompts a step needs, "
            f"but {which} draws more within the step. Set trainer.mode=sync, or leave it out."
        )
    if mode == "fully_async":
        yield from _fully_async_is_possible(config)


def _fully_async_is_possible(config: TrainConfig) -> Iterator[str]:
    options = config.async_training
    rollout = config.actor_rollout_ref.rollout
    if rollout.uses_agents:
        yield (
            "trainer.mode=fully_async cannot freeze the episodes of agent loops in this version. "
            "Set trainer.mode=one_step_off, which plays them while the actor learns."
        )
    if options.trigger_parameter_sync_step > 1 and not rollout_is_apart(config):
        yield (
            "async_training.trigger_parameter_sync_step="
            f"{options.trigger_parameter_sync_step} keeps older weights in the rollout, which "
            "needs ranks of its own: set trainer.placement.rollout, or "
            "trigger_parameter_sync_step=1."
        )
    yield from _batch_is_required(config, options)


def _batch_is_required(config: TrainConfig, options: AsyncTrainingConfig) -> Iterator[str]:
    batch = config.data.train_batch_size
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size or batch
    required = options.require_batches
    if required is not None and required * mini != batch:
        yield (
            "async_training.require_batches times actor_rollout_ref.actor.ppo_mini_batch_size is "
            f"the batch of a step, got {required} x {mini} and data.train_batch_size={batch}. Set "
            f"data.train_batch_size={required * mini}, or leave require_batches out."
        )


def async_doubts(config: TrainConfig) -> Iterator[str]:
    """Yield settings of asynchronous training that run, but are rarely intended."""
    correction = config.algorithm.rollout_correction
    options = config.async_training
    is_stale = config.trainer.mode == "one_step_off"
    if config.trainer.mode == "fully_async":
        is_stale = _may_be_stale(
            options.staleness_threshold, options.max_staleness, options.on_stale
        )
    if is_stale and not correction.bypass_mode and not correction.changes_update:
        yield (
            f"trainer.mode={config.trainer.mode} learns from tokens that older weights drew, and "
            f"nothing corrects for that. Set {_BYPASS}=True, or rollout_is=token."
        )


RULES = (schedule_is_possible,)
