"""Contradictions between the keys of asynchronous training, and its defaults. See `rules`."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.config.algorithm import CORRECTION_PRESETS
from verl.config.async_training import AsyncTrainingConfig
from verl.config.placement import rollout_is_apart
from verl.config.train import TrainConfig
from verl.utils.errors import ConfigError
from verl.utils.logging import logger

_READ_BY_FULLY_ASYNC = (
    *("staleness_threshold", "max_staleness", "on_stale", "trigger_parameter_sync_step"),
    *("require_batches", "partial_rollout", "keep_kv_cache"),
)
_CORRECTION = "algorithm.rollout_correction."
_WEIGHTS = _CORRECTION + "rollout_is"


def with_correction_forms(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with a preset of the correction, and with bounds "low_high", in single keys.

    A weight threshold of two numbers is IcePop's: weights outside are 0.
    """
    written = dict(given)
    preset = given.get(_CORRECTION + "preset")
    for name, value in CORRECTION_PRESETS.get(str(preset), {}).items():
        written.setdefault(_CORRECTION + name, value)

    for kind in ("is", "rs"):
        key = f"{_CORRECTION}rollout_{kind}_threshold"
        bounds = written.get(key)
        if not isinstance(bounds, str) or "_" not in bounds:
            continue
        lower, _, upper = bounds.partition("_")
        try:
            written[key] = float(upper)
            written.setdefault(f"{key}_lower", float(lower))
        except ValueError as error:
            raise ConfigError(
                f"{key} must be a number or two as in 0.5_2.0, got '{bounds}'. Set {key}=0.5_2.0."
            ) from error
        if kind == "is":
            written.setdefault(_CORRECTION + "rollout_is_mode", "mask")
    return written


def with_batch_of_a_step(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with the batch for which scripts of verl's fully asynchronous program write 0.

    It is `require_batches` mini-batches, of which that program takes one by default.
    """
    batch = "data.train_batch_size"
    if given.get(batch) != 0:
        return dict(given)
    mode = given.get("trainer.mode", "sync")
    if mode != "fully_async":
        raise ConfigError(
            f"{batch} must be above 0 with trainer.mode={mode}, got 0. Set it to the prompts of a "
            "step. (0 is async_training.require_batches x "
            "actor_rollout_ref.actor.ppo_mini_batch_size with trainer.mode=fully_async.)"
        )

    mini_key = "actor_rollout_ref.actor.ppo_mini_batch_size"
    mini = given.get(mini_key)
    required = given.get("async_training.require_batches") or 1
    if not isinstance(mini, int) or not isinstance(required, int):
        raise ConfigError(
            f"{batch}=0 is async_training.require_batches x {mini_key}, which must be whole "
            f"numbers, got {required} and {mini}. Set them, or {batch} to the prompts of a step."
        )
    logger.info("%s=0 is %d x %d = %d prompts.", batch, required, mini, required * mini)
    return {**given, batch: required * mini}


def with_async_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` (flat, aliases renamed), with a correction where tokens may be stale.

    Without one the ratio would be against the current policy, 1 for every token, and hide that
    older weights drew it. A clipped ratio against those (bypass_mode) is no default: it leaves out
    the tokens that have become likelier, but only where their response did well.
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
        "trainer.mode=%s sets %s=token: each token weighs by the policy before the update against "
        "the one that drew it. Any key of algorithm.rollout_correction replaces that.",
        mode,
        _WEIGHTS,
    )
    return {**given, _WEIGHTS: "token"}


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
    if options.trigger_parameter_sync_step > 1 and not rollout_is_apart(config):
        yield (
            "async_training.trigger_parameter_sync_step="
            f"{options.trigger_parameter_sync_step} keeps older weights in the rollout, which "
            "needs ranks of its own: set trainer.placement.rollout, or "
            "trigger_parameter_sync_step=1."
        )
    if options.keep_kv_cache:
        yield from _cache_can_be_kept(config)
    yield from _batch_is_required(config, options)


def validation_can_run_ahead(config: TrainConfig) -> Iterator[str]:
    trainer = config.trainer
    if not trainer.dynamic_validation:
        return

    key = "trainer.dynamic_validation=True"
    if trainer.mode == "sync":
        yield (
            f"{key} validates while the next step trains, which trainer.mode=sync does not do with "
            "generation. Set trainer.mode=one_step_off or fully_async, or dynamic_validation=False."
        )
    if not rollout_is_apart(config):
        yield (
            f"{key} needs a rollout with ranks of its own. Set trainer.placement.rollout, or "
            "dynamic_validation=False."
        )
    between = config.async_training.trigger_parameter_sync_step
    if trainer.mode == "fully_async" and trainer.test_freq > 0 and trainer.test_freq % between:
        yield (
            f"{key} validates weights that were just handed over, so trainer.test_freq must be a "
            f"multiple of async_training.trigger_parameter_sync_step, got {trainer.test_freq} and "
            f"{between}. Set test_freq={(trainer.test_freq // between + 1) * between}."
        )


def _cache_can_be_kept(config: TrainConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    keys = "async_training.keep_kv_cache=True"
    if rollout.free_cache_engine and not rollout_is_apart(config):
        yield (
            f"{keys} needs memory for the cache during the update, but "
            "actor_rollout_ref.rollout.free_cache_engine=True gives it to the trainer. Set "
            "free_cache_engine=False, or keep_kv_cache=False."
        )
    if rollout.deterministic:
        yield (
            f"{keys} draws from keys that depend on the time of the update, but "
            "actor_rollout_ref.rollout.deterministic=True promises draws that do not. Set one of "
            "them to False."
        )


def proximal_is_known(config: TrainConfig) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    if correction.proximal != "loglinear":
        return
    prefix = f"{_CORRECTION}proximal=loglinear"
    if config.trainer.mode != "fully_async":
        yield (
            f"{prefix} interpolates by the age of each token, which trainer.mode=fully_async "
            f"records, got {config.trainer.mode}. Set trainer.mode=fully_async, or "
            "proximal=recompute."
        )

    asked = {
        "bypass_mode": correction.bypass_mode,
        "rollout_rs": correction.rollout_rs is not None,
        "rollout_token_veto_threshold": correction.rollout_token_veto_threshold is not None,
        "rollout_is=sequence": correction.rollout_is == "sequence",
        "rollout_is_batch_normalize": correction.rollout_is_batch_normalize,
    }
    for name, is_asked in asked.items():
        if is_asked:
            yield (
                f"{prefix} knows old log-probs within the update alone, so {name} cannot be "
                "applied before it. Leave it out, or set proximal=recompute."
            )

    if config.advantages_read_old_log_probs:
        yield (
            f"{prefix} makes no pass for old log-probs, which the advantages of this run read. Set "
            "proximal=recompute."
        )


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

    is_corrected = correction.needs_no_pass or correction.changes_update
    if is_stale and not is_corrected:
        yield (
            f"trainer.mode={config.trainer.mode} learns from tokens that older weights drew, and "
            f"nothing corrects for that. Set {_WEIGHTS}=token, or leave the section out."
        )

    if config.trainer.mode != "fully_async":
        plain = AsyncTrainingConfig()
        for name in _READ_BY_FULLY_ASYNC:
            value = getattr(options, name)
            if value != getattr(plain, name):
                yield (
                    f"async_training.{name}={value} has no effect: it is read with "
                    f"trainer.mode=fully_async only, got trainer.mode={config.trainer.mode}."
                )

    if config.trainer.dynamic_validation and config.trainer.test_freq <= 0:
        yield (
            "trainer.dynamic_validation=True has no effect with trainer.test_freq="
            f"{config.trainer.test_freq}: no step is followed by a validation. Set test_freq to "
            "the steps between two validations, or dynamic_validation=False."
        )


RULES = (schedule_is_possible, validation_can_run_ahead, proximal_is_known)
