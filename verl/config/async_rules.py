"""Contradictions between the keys of asynchronous training. See `rules`."""

from verl.config.async_defaults import may_be_stale
from verl.config.placement import rollout_is_apart
from verl.config.rule_table import Messages, Rows, table
from verl.config.train import TrainConfig


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
    prefix = "algorithm.rollout_correction.proximal=loglinear"
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
    is_stale = may_be_stale(
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
