"""Contradictions between the keys of the algorithm. See `rules`."""

from collections.abc import Iterator

from verl.config.choices import EXACT_DIVERGENCES, SEQUENCE_LOSSES
from verl.config.keys import value_at
from verl.config.placement import trained_sections
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


def groups_can_be_compared(config: TrainConfig) -> Iterator[str]:
    if config.trainer.val_only:
        return
    algorithm = config.algorithm
    n = config.actor_rollout_ref.rollout.n
    compares = algorithm.adv_estimator in COMPARES_RESPONSES

    if compares and n < 2 and not config.distillation.is_whole_loss:
        yield (
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares the responses to one "
            f"prompt and needs actor_rollout_ref.rollout.n of at least 2, got {n}. Set it to 8, "
            "say, or algorithm.adv_estimator=gae."
        )

    if algorithm.filter_groups.enable and n < 2:
        yield (
            "algorithm.filter_groups.enable=True keeps the prompts with responses that differ and "
            f"needs actor_rollout_ref.rollout.n of at least 2, got {n}. Set it to 16, say."
        )

    if (
        algorithm.filter_groups.enable
        and algorithm.filter_groups.metric == "seq_final_reward"
        and algorithm.use_kl_in_reward
    ):
        yield (
            "algorithm.filter_groups.metric=seq_final_reward is the score less the KL penalty of "
            "algorithm.use_kl_in_reward=True, which differs for all responses and keeps every "
            "prompt. Set algorithm.filter_groups.metric=score."
        )

    if algorithm.filter_groups.enable and algorithm.adv_estimator == "remax":
        yield (
            "algorithm.filter_groups compares the samples of a prompt, "
            "algorithm.adv_estimator=remax each with a greedy one; got both. Set "
            "adv_estimator=grpo, or filter_groups.enable=False."
        )

    keys = algorithm.gdpo_reward_keys
    weights = algorithm.gdpo_reward_weights
    if weights and len(weights) != len(keys):
        yield (
            f"algorithm.gdpo_reward_weights has {len(weights)} weights for the {len(keys)} fields "
            "of algorithm.gdpo_reward_keys. Give one each, or none."
        )


def rollout_is_corrected_once(config: TrainConfig) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    prefix = "algorithm.rollout_correction"
    rejections = {
        "rollout_rs": correction.rollout_rs,
        "rollout_token_veto_threshold": correction.rollout_token_veto_threshold,
    }
    for key, value in rejections.items():
        if correction.bypass_mode and value is not None:
            yield (
                f"{prefix}.{key}={value} compares the rollout with the trainer's own old "
                f"log-probs, which {prefix}.bypass_mode=True does not compute. Set one of them."
            )

    normalizes = correction.rollout_is_batch_normalize
    if normalizes and (correction.bypass_mode or correction.rollout_is is None):
        yield (
            f"{prefix}.rollout_is_batch_normalize=True divides the weights of rollout_is, known "
            f"before the update, by their mean. Set {prefix}.rollout_is=token or sequence with "
            "bypass_mode=False, or leave it out."
        )

    is_reinforce = correction.loss_type == "reinforce"
    if correction.bypass_mode and correction.rollout_is is not None and not is_reinforce:
        yield (
            f"{prefix}.rollout_is={correction.rollout_is} would correct a second time: with "
            f"{prefix}.bypass_mode=True and loss_type=ppo_clip the ratio of the policy loss is "
            "already against the rollout. Set rollout_is=null, loss_type=reinforce, or "
            "bypass_mode=False."
        )
    if is_reinforce and not correction.bypass_mode:
        yield (
            f"{prefix}.loss_type=reinforce weighs by the current policy against the rollout and "
            f"needs {prefix}.bypass_mode=True, got False. Set it, or loss_type=ppo_clip."
        )
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if is_reinforce and loss_mode != "vanilla":
        yield (
            f"{prefix}.loss_type=reinforce is the policy loss, got "
            f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode} as well. Leave "
            "loss_mode=vanilla, or set loss_type=ppo_clip."
        )
    distillation = config.distillation
    if is_reinforce and distillation.is_whole_loss and not distillation.is_reward:
        yield (
            f"{prefix}.loss_type=reinforce is a policy loss, which distillation replaces under "
            "distillation.distillation_loss.use_task_rewards=False. Set use_task_rewards=True, or "
            "loss_type=ppo_clip."
        )

    for key in ("rollout_is_threshold", "rollout_rs_threshold"):
        rejects = key == "rollout_rs_threshold"
        if rejects and correction.rollout_rs == "k3":
            continue
        upper = getattr(correction, key)
        lower = getattr(correction, f"{key}_lower")
        smallest = lower or 0.0
        if rejects and lower is None:
            smallest = 1 / upper
        if smallest > upper:
            yield (
                f"{prefix}.{key}_lower must not exceed {key}, got {lower} and {upper}. A band "
                "about 1 is meant, [0.5, 2] say."
            )


def teacher_has_what_it_needs(config: TrainConfig) -> Iterator[str]:
    if not config.distillation.enabled:
        return
    loss = config.distillation.distillation_loss
    prefix = "distillation.distillation_loss"

    if not config.distillation.teacher_models.teacher_model.model_path:
        yield (
            "distillation.enabled=True needs a teacher, got no "
            "distillation.teacher_models.teacher_model.model_path. Set it to a folder or hub name."
        )

    if loss.loss_mode == "jsd" and loss.jsd_beta >= 1:
        yield (
            f"{prefix}.jsd_beta must be below 1, got {loss.jsd_beta}. The limit at 1 is "
            f"{prefix}.loss_mode=reverse_kl."
        )

    if loss.use_policy_gradient and loss.loss_mode in EXACT_DIVERGENCES:
        yield (
            f"{prefix}.use_policy_gradient=True subtracts an estimate from the drawn token, got "
            f"loss_mode={loss.loss_mode}, which is over the whole vocabulary. Set "
            f"{prefix}.loss_mode=k1, or use_policy_gradient=False."
        )


def baseline_has_what_it_needs(config: TrainConfig) -> Iterator[str]:
    if config.needs_sum_pi_squared and config.algorithm.rollout_correction.bypass_mode:
        yield (
            "algorithm.adv_estimator=optimal_token_baseline reads the policy's distributions in "
            "the pass for old log-probs, which algorithm.rollout_correction.bypass_mode=True "
            "leaves out. Set bypass_mode=False."
        )


RULES = (
    groups_can_be_compared,
    rollout_is_corrected_once,
    teacher_has_what_it_needs,
    baseline_has_what_it_needs,
)


def doubts(config: TrainConfig) -> Iterator[str]:
    """Yield combinations of the algorithm's keys that run, but are rarely intended."""
    actor = config.actor_rollout_ref.actor
    loss = actor.policy_loss.loss_mode
    if loss in SEQUENCE_LOSSES and actor.loss_agg_mode != "seq-mean-token-mean":
        yield (
            f"actor.policy_loss.loss_mode={loss} has one ratio a response and is written for "
            f"loss_agg_mode=seq-mean-token-mean; with {actor.loss_agg_mode} long responses count "
            "more."
        )

    if loss == "sapo" and actor.loss_agg_mode == "token-mean":
        yield (
            "actor.policy_loss.loss_mode=sapo is defined with the mean over the tokens of each "
            "response (loss_agg_mode=seq-mean-token-mean); with token-mean long responses count "
            "more."
        )

    distillation = config.distillation.distillation_loss
    is_differentiated = config.distillation.enabled and not distillation.use_policy_gradient
    if is_differentiated and distillation.loss_mode in ("kl", "k1"):
        yield (
            f"distillation.distillation_loss.loss_mode={distillation.loss_mode} has an expected "
            "gradient of 0 when it is differentiated. Set use_policy_gradient=True, or "
            "loss_mode=reverse_kl, k1+ or k3."
        )

    if config.algorithm.gdpo_reward_keys and config.algorithm.adv_estimator != "gdpo":
        yield (
            "algorithm.gdpo_reward_keys has no effect: it is read with "
            "algorithm.adv_estimator=gdpo only."
        )

    correction = config.algorithm.rollout_correction
    if correction.loss_type == "reinforce" and correction.rollout_is is None:
        yield (
            "algorithm.rollout_correction.loss_type=reinforce without rollout_is does not correct: "
            "every token weighs 1. Set rollout_is=token or sequence."
        )

    yield from _thresholds_that_leave_nothing(config)
    yield from _steps_beyond_the_run(config)


def _thresholds_that_leave_nothing(config: TrainConfig) -> Iterator[str]:
    """Yield bounds that hit (nearly) every token, response or weight."""
    correction = config.algorithm.rollout_correction
    prefix = "algorithm.rollout_correction"
    veto = correction.rollout_token_veto_threshold
    if veto is not None and veto >= 1:
        yield (
            f"{prefix}.rollout_token_veto_threshold={veto} rejects every response with a token "
            "that the trainer finds less likely than the rollout did, which is nearly every one: "
            "nothing is learned. 1e-4 is usual."
        )
    for name in ("rollout_is", "rollout_rs"):
        asked = getattr(correction, name)
        upper = getattr(correction, f"{name}_threshold")
        lower = getattr(correction, f"{name}_threshold_lower")
        if asked not in (None, "k3") and (upper < 1 or (lower is not None and lower > 1)):
            yield (
                f"{prefix}.{name}_threshold={upper} with {name}_threshold_lower={lower} leaves out "
                "a ratio of 1, where rollout and trainer agree. A band about 1 is usual, [0.5, 2] "
                "say."
            )

    buffer = config.reward_model.overlong_buffer
    longest = config.data.max_response_length
    if buffer.enable and buffer.len >= longest:
        yield (
            f"reward_model.overlong_buffer.len={buffer.len} begins before the first of "
            f"data.max_response_length={longest} tokens: every response is punished."
        )


def _steps_beyond_the_run(config: TrainConfig) -> Iterator[str]:
    """Yield keys that count on steps after the end of the run."""
    trainer = config.trainer
    last = config.trainer.total_training_steps
    if last is None:
        return

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
