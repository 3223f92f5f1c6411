"""Contradictions between the keys of the algorithm. See `rules`."""

import math

from verl.config.choices import EXACT_DIVERGENCES, SEQUENCE_LOSSES
from verl.config.keys import value_at
from verl.config.placement import trained_sections
from verl.config.rule_table import Messages, Rows, table
from verl.config.train import TrainConfig

COMPARES_RESPONSES = (
    "grpo",
    "grpo_passk",
    "rloo",
    "opo",
    "gpg",
    "gdpo",
    "reinforce_plus_plus_baseline",
    "optimal_token_baseline",
)


@table
def groups_can_be_compared(config: TrainConfig) -> Rows:
    if config.trainer.val_only:
        return ()
    algorithm = config.algorithm
    filters = algorithm.filter_groups
    is_single = config.actor_rollout_ref.rollout.n < 2
    compares = algorithm.adv_estimator in COMPARES_RESPONSES
    by_reward = filters.metric == "seq_final_reward" and algorithm.use_kl_in_reward
    num_keys = len(algorithm.gdpo_reward_keys)
    num_weights = len(algorithm.gdpo_reward_weights)

    return (
        (
            compares and is_single and not config.distillation.is_whole_loss,
            "{algorithm.adv_estimator=} compares the responses to one prompt and needs "
            "actor_rollout_ref.rollout.n of at least 2, got {actor_rollout_ref.rollout.n}. Set it "
            "to 8, say, or algorithm.adv_estimator=gae.",
        ),
        (
            filters.enable and is_single,
            "algorithm.filter_groups.enable=True keeps the prompts with responses that differ and "
            "needs actor_rollout_ref.rollout.n of at least 2, got {actor_rollout_ref.rollout.n}. "
            "Set it to 16, say.",
        ),
        (
            filters.enable and by_reward,
            "algorithm.filter_groups.metric=seq_final_reward is the score less the KL penalty of "
            "algorithm.use_kl_in_reward=True, which differs for all responses and keeps every "
            "prompt. Set algorithm.filter_groups.metric=score.",
        ),
        (
            filters.enable and algorithm.adv_estimator == "remax",
            "algorithm.filter_groups compares the samples of a prompt, "
            "algorithm.adv_estimator=remax each with a greedy one; got both. Set "
            "adv_estimator=grpo, or filter_groups.enable=False.",
        ),
        (
            num_weights not in (0, num_keys),
            f"algorithm.gdpo_reward_weights has {num_weights} weights for the {num_keys} fields of "
            "algorithm.gdpo_reward_keys. Give one each, or none.",
        ),
    )


@table
def rollout_is_corrected_once(config: TrainConfig) -> Rows:
    correction = config.algorithm.rollout_correction
    bypasses = correction.bypass_mode
    weighs = correction.rollout_is is not None
    is_reinforce = correction.loss_type == "reinforce"
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    distillation = config.distillation
    is_replaced = distillation.is_whole_loss and not distillation.is_reward

    return (
        (
            bypasses and correction.rollout_rs is not None,
            "{algorithm.rollout_correction.rollout_rs=} compares the rollout with the trainer's "
            "own old log-probs, which algorithm.rollout_correction.bypass_mode=True does not "
            "compute. Set one of them.",
        ),
        (
            bypasses and correction.rollout_token_veto_threshold is not None,
            "{algorithm.rollout_correction.rollout_token_veto_threshold=} compares the rollout "
            "with the trainer's own old log-probs, which "
            "algorithm.rollout_correction.bypass_mode=True does not compute. Set one of them.",
        ),
        (
            correction.rollout_is_batch_normalize and (bypasses or not weighs),
            "algorithm.rollout_correction.rollout_is_batch_normalize=True divides the weights of "
            "rollout_is, known before the update, by their mean. Set "
            "algorithm.rollout_correction.rollout_is=token or sequence with bypass_mode=False, or "
            "leave it out.",
        ),
        (
            bypasses and weighs and not is_reinforce,
            "{algorithm.rollout_correction.rollout_is=} would correct a second time: with "
            "algorithm.rollout_correction.bypass_mode=True and loss_type=ppo_clip the ratio of the "
            "policy loss is already against the rollout. Set rollout_is=null, loss_type=reinforce, "
            "or bypass_mode=False.",
        ),
        (
            is_reinforce and not bypasses,
            "algorithm.rollout_correction.loss_type=reinforce weighs by the current policy against "
            "the rollout and needs algorithm.rollout_correction.bypass_mode=True, got False. Set "
            "it, or loss_type=ppo_clip.",
        ),
        (
            is_reinforce and loss_mode != "vanilla",
            "algorithm.rollout_correction.loss_type=reinforce is the policy loss, got "
            "{actor_rollout_ref.actor.policy_loss.loss_mode=} as well. Leave loss_mode=vanilla, or "
            "set loss_type=ppo_clip.",
        ),
        (
            is_reinforce and is_replaced,
            "algorithm.rollout_correction.loss_type=reinforce is a policy loss, which distillation "
            "replaces under distillation.distillation_loss.use_task_rewards=False. Set "
            "use_task_rewards=True, or loss_type=ppo_clip.",
        ),
        (
            bypasses and config.needs_sum_pi_squared,
            "algorithm.adv_estimator=optimal_token_baseline reads the policy's distributions in "
            "the pass for old log-probs, which algorithm.rollout_correction.bypass_mode=True "
            "leaves out. Set bypass_mode=False.",
        ),
    )


@table
def bands_are_not_empty(config: TrainConfig) -> Rows:
    correction = config.algorithm.rollout_correction
    lowest_weight = correction.rollout_is_threshold_lower or 0.0

    return (
        (
            lowest_weight > correction.rollout_is_threshold,
            "algorithm.rollout_correction.rollout_is_threshold_lower must not exceed "
            "rollout_is_threshold, got {algorithm.rollout_correction.rollout_is_threshold_lower} "
            "and {algorithm.rollout_correction.rollout_is_threshold}. A band about 1 is meant, "
            "[0.5, 2] say.",
        ),
        (
            correction.accept_band[0] > correction.accept_band[1],
            "algorithm.rollout_correction.rollout_rs_threshold_lower must not exceed "
            "rollout_rs_threshold, got {algorithm.rollout_correction.rollout_rs_threshold_lower} "
            "and {algorithm.rollout_correction.rollout_rs_threshold}. A band about 1 is meant, "
            "[0.5, 2] say.",
        ),
    )


@table
def extra_losses_have_finite_weights(config: TrainConfig) -> Rows:
    odd = []
    for term in config.actor_rollout_ref.actor.loss_extra:
        if not math.isfinite(term.coef):
            odd.append(f"{term.coef} for '{term.name}'")

    return (
        (
            bool(odd),
            "actor_rollout_ref.actor.loss_extra: coef must be finite, got {odd}. No update would "
            "have a finite loss.",
            {"odd": ", ".join(odd)},
        ),
    )


@table
def teacher_has_what_it_needs(config: TrainConfig) -> Rows:
    if not config.distillation.enabled:
        return ()
    loss = config.distillation.distillation_loss

    return (
        (
            not config.distillation.teacher_models.teacher_model.model_path,
            "distillation.enabled=True needs a teacher, got no "
            "distillation.teacher_models.teacher_model.model_path. Set it to a folder or hub name.",
        ),
        (
            loss.loss_mode == "jsd" and loss.jsd_beta >= 1,
            "distillation.distillation_loss.jsd_beta must be below 1, got "
            "{distillation.distillation_loss.jsd_beta}. The limit at 1 is "
            "distillation.distillation_loss.loss_mode=reverse_kl.",
        ),
        (
            loss.use_policy_gradient and loss.loss_mode in EXACT_DIVERGENCES,
            "distillation.distillation_loss.use_policy_gradient=True subtracts an estimate from "
            "the drawn token, got loss_mode={distillation.distillation_loss.loss_mode}, which is "
            "over the whole vocabulary. Set distillation.distillation_loss.loss_mode=k1, or "
            "use_policy_gradient=False.",
        ),
    )


RULES = (
    groups_can_be_compared,
    rollout_is_corrected_once,
    bands_are_not_empty,
    extra_losses_have_finite_weights,
    teacher_has_what_it_needs,
)


def algorithm_doubts(config: TrainConfig) -> Messages:
    """Yield combinations of the algorithm's keys that run, but are rarely intended."""
    yield from _doubtful_losses(config)
    yield from _thresholds_that_leave_nothing(config)
    if config.trainer.total_training_steps is not None:
        yield from steps_beyond_the_run(config, config.trainer.total_training_steps)


@table
def _doubtful_losses(config: TrainConfig) -> Rows:
    actor = config.actor_rollout_ref.actor
    loss = actor.policy_loss.loss_mode
    by_tokens = actor.loss_agg_mode == "token-mean"
    distillation = config.distillation.distillation_loss
    is_differentiated = config.distillation.enabled and not distillation.use_policy_gradient
    correction = config.algorithm.rollout_correction
    is_reinforce = correction.loss_type == "reinforce"

    return (
        (
            loss in SEQUENCE_LOSSES and actor.loss_agg_mode != "seq-mean-token-mean",
            "actor.policy_loss.loss_mode={actor_rollout_ref.actor.policy_loss.loss_mode} has one "
            "ratio a response and is written for loss_agg_mode=seq-mean-token-mean; with "
            "{actor_rollout_ref.actor.loss_agg_mode} long responses count more.",
        ),
        (
            loss == "sapo" and by_tokens,
            "actor.policy_loss.loss_mode=sapo is defined with the mean over the tokens of each "
            "response (loss_agg_mode=seq-mean-token-mean); with token-mean long responses count "
            "more.",
        ),
        (
            is_differentiated and distillation.loss_mode in ("kl", "k1"),
            "{distillation.distillation_loss.loss_mode=} has an expected gradient of 0 when it is "
            "differentiated. Set use_policy_gradient=True, or loss_mode=reverse_kl, k1+ or k3.",
        ),
        (
            is_reinforce and correction.rollout_is is None,
            "algorithm.rollout_correction.loss_type=reinforce without rollout_is does not correct: "
            "every token weighs 1. Set rollout_is=token or sequence.",
        ),
    )


@table
def _thresholds_that_leave_nothing(config: TrainConfig) -> Rows:
    """Yield bounds that hit (nearly) every token, response or weight."""
    correction = config.algorithm.rollout_correction
    veto = correction.rollout_token_veto_threshold
    yield (
        veto is not None and veto >= 1,
        "{algorithm.rollout_correction.rollout_token_veto_threshold=} rejects every response with "
        "a token that the trainer finds less likely than the rollout did, which is nearly every "
        "one: nothing is learned. 1e-4 is usual.",
    )

    for name in ("rollout_is", "rollout_rs"):
        asked = getattr(correction, name)
        upper = getattr(correction, f"{name}_threshold")
        lower = getattr(correction, f"{name}_threshold_lower")
        yield (
            asked not in (None, "k3") and (upper < 1 or (lower is not None and lower > 1)),
            f"algorithm.rollout_correction.{name}_threshold={upper} with {name}_threshold_lower="
            f"{lower} leaves out a ratio of 1, where rollout and trainer agree. A band about 1 is "
            "usual, [0.5, 2] say.",
        )

    buffer = config.reward_model.overlong_buffer
    yield (
        buffer.enable and buffer.len == config.data.max_response_length,
        "{reward_model.overlong_buffer.len=} begins before the first of "
        "{data.max_response_length=} tokens: every response is punished.",
    )


def steps_beyond_the_run(config: TrainConfig, last: int) -> Messages:
    """Yield keys that count on steps after the last one of the run."""
    trainer = config.trainer
    if trainer.critic_warmup >= last:
        yield (
            f"trainer.critic_warmup={trainer.critic_warmup} steps train the critic alone, and the "
            f"run has {last}: the actor learns nothing."
        )

    for section in trained_sections(config):
        optim = value_at(config, f"{section}.optim")
        if optim.lr_warmup_steps > last:
            yield (
                f"{section}.optim.lr_warmup_steps={optim.lr_warmup_steps} is more than the run's "
                f"{last} steps: the learning rate never comes to {section}.optim.lr={optim.lr}."
            )

    if beyond := [step for step in trainer.profile_steps or () if not 1 <= step <= last]:
        yield (
            f"trainer.profile_steps={beyond} are no steps of a run of {last}: they have no "
            "timeline."
        )
