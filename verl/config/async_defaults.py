"""Values that follow from others with asynchronous training and the correction for its tokens.

All functions take flat values, in which other names of keys are renamed.
"""

from verl.config.algorithm import CORRECTION_PRESETS
from verl.config.async_training import AsyncTrainingConfig
from verl.config.keys import Values
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
    """Return `given` with a correction where tokens may be stale.

    Without one the ratio would be against the current policy, 1 for every token, and hide that
    older weights drew it. A clipped ratio against those (bypass_mode) is no default: it leaves out
    the tokens that have become likelier, but only where their response did well.
    """
    mode = given.get("trainer.mode", "sync")
    plain = AsyncTrainingConfig()
    is_stale = may_be_stale(
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


def may_be_stale(mode: str, threshold: float, most: int | None, on_stale: str) -> bool:
    """Return whether tokens may be learned from that older weights drew."""
    if mode != "fully_async":
        return mode == "one_step_off"
    return threshold != 0 and (most != 0 or on_stale != "wait")
