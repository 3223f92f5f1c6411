"""Contradictions between the keys of asynchronous training, and its defaults. See `rules`."""

from verl.config.algorithm import CORRECTION_PRESETS
from verl.config.async_training import AsyncTrainingConfig
from verl.config.keys import Values
from verl.config.placement import rollout_is_apart
from verl.config.rule_table import Messages, Rows, table
from verl.config.train import TrainConfig
from verl.utils.errors import ConfigError
from verl.utils.logging import logger

_CORRECTION = "algorithm.rollout_correction."
_WEIGHTS = _CORRECTION + "rollout_is"


def with_correction_forms(given: Values) -> Values:
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


def with_batch_of_a_step(given: Values) -> Values:
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


def with_async_defaults(given: Values) -> Values:
    """Return `given` (flat, aliases renamed), with a correction where tokens may be stale.

    Without one the ratio would be against the current policy, 1 for every token, and hide that
    older weights drew it. A clipped ratio against those (bypass_mode) is no default: it leaves out
    the tokens that have become likelier, but only where their response did well.
    """
    mode = given.get("trainer.mode", "sync")
    plain = AsyncTrainingConfig()
    is_stale = _may_be_stale(
        mode,
        given.get("async_training.staleness_threshold", plain.staleness_threshold),
        given.get("async_training.max_staleness"),
        given.get("async_training.on_stale", plain.on_stale),
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


def _may_be_stale(mode: str, threshold: float, most: int | None, on_stale: str) -> bool:
    """Return whether tokens may be learned from that older weights drew."""
    if mode != "fully_async":
        return mode == "one_step_off"
    return threshold != 0 and (most != 0 or on_stale != "wait")


def schedule_is_possible(config: TrainConfig) -> Messages:
    mode = config.trainer.mode
    if mode != "sync" and config.algorithm.adv_estimator == "remax":
        yield (
            "algorithm.adv_estimator=remax compares with a greedy response by the weights that "
            f"drew the samples, but trainer.mode={mode} may have newer ones when it scores them. "
            "Set trainer.mode=sync, or adv_estimator=rloo."
        )


@table
def fully_async_is_possible(config: TrainConfig) -> Rows:
    if config.trainer.mode != "fully_async":
        return ()
    options = config.async_training
    rollout = config.actor_rollout_ref.rollout
    is_shared = not rollout_is_apart(config)
    batch = config.data.train_batch_size
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size or batch
    required = options.require_batches
    required_batch = required * mini if required else batch

    return (
        (
            options.trigger_parameter_sync_step > 1 and is_shared,
            "{async_training.trigger_parameter_sync_step=} keeps older weights in the rollout, "
            "which needs ranks of its own: set trainer.placement.rollout, or "
            "trigger_parameter_sync_step=1.",
        ),
        (
            options.keep_kv_cache and rollout.free_cache_engine and is_shared,
            "async_training.keep_kv_cache=True needs memory for the cache during the update, but "
            "actor_rollout_ref.rollout.free_cache_engine=True gives it to the trainer. Set "
            "free_cache_engine=False, or keep_kv_cache=False.",
        ),
        (
            options.keep_kv_cache and rollout.deterministic,
            "async_training.keep_kv_cache=True draws from keys that depend on the time of the "
            "update, but actor_rollout_ref.rollout.deterministic=True promises draws that do not. "
            "Set one of them to False.",
        ),
        (
            required_batch != batch,
            "async_training.require_batches times actor_rollout_ref.actor.ppo_mini_batch_size is "
            f"the batch of a step, got {required} x {mini} and data.train_batch_size={batch}. Set "
            f"data.train_batch_size={required_batch}, or leave require_batches out.",
        ),
    )


@table
def validation_can_run_ahead(config: TrainConfig) -> Rows:
    trainer = config.trainer
    if not trainer.dynamic_validation:
        return ()
    between = config.async_training.trigger_parameter_sync_step
    is_between = trainer.test_freq > 0 and trainer.test_freq % between != 0
    next_freq = (trainer.test_freq // between + 1) * between

    return (
        (
            trainer.mode == "sync",
            "trainer.dynamic_validation=True validates while the next step trains, which "
            "trainer.mode=sync does not do with generation. Set trainer.mode=one_step_off or "
            "fully_async, or dynamic_validation=False.",
        ),
        (
            not rollout_is_apart(config),
            "trainer.dynamic_validation=True needs a rollout with ranks of its own. Set "
            "trainer.placement.rollout, or dynamic_validation=False.",
        ),
        (
            trainer.mode == "fully_async" and is_between,
            "trainer.dynamic_validation=True validates weights that were just handed over, so "
            "trainer.test_freq must be a multiple of async_training.trigger_parameter_sync_step, "
            f"got {trainer.test_freq} and {between}. Set test_freq={next_freq}.",
        ),
    )


def proximal_is_known(config: TrainConfig) -> Messages:
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


@table
def async_doubts(config: TrainConfig) -> Rows:
    """Return settings of asynchronous training that run, but are rarely intended."""
    trainer = config.trainer
    options = config.async_training
    correction = config.algorithm.rollout_correction
    is_corrected = correction.needs_no_pass or correction.changes_update
    is_stale = _may_be_stale(
        trainer.mode, options.staleness_threshold, options.max_staleness, options.on_stale
    )

    return (
        (
            is_stale and not is_corrected,
            "{trainer.mode=} learns from tokens that older weights drew, and nothing corrects for "
            "that. Set algorithm.rollout_correction.rollout_is=token, or leave the section out.",
        ),
        (
            trainer.dynamic_validation and trainer.test_freq <= 0,
            "trainer.dynamic_validation=True has no effect with {trainer.test_freq=}: no step is "
            "followed by a validation. Set test_freq to the steps between two validations, or "
            "dynamic_validation=False.",
        ),
    )


RULES = (
    schedule_is_possible,
    fully_async_is_possible,
    validation_can_run_ahead,
    proximal_is_known,
)
