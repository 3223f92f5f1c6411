"""Keys that nothing reads, because another key turns their part off."""

from collections.abc import Iterator
from typing import NamedTuple

from verl.config.choices import ESTIMATORS, POLICY_LOSSES
from verl.config.keys import is_changed, keys_of, value_at
from verl.config.placement import trained_sections
from verl.config.rule_table import Messages
from verl.config.train import TrainConfig

# Keys of `algorithm`, and the packaged estimators that read them.
READ_BY_ESTIMATORS = {
    "gamma": ("gae", "reinforce_plus_plus", "turn_rloo"),
    "lam": ("gae",),
    "norm_adv_by_std_in_grpo": ("grpo", "grpo_passk"),
}
_CLIPS = ("vanilla", "cispo", "gspo", "geo_mean", "clip_cov")
# Keys of `actor_rollout_ref.actor`, and the packaged policy losses that read them.
READ_BY_LOSSES = {
    "clip_ratio": _CLIPS,
    "clip_ratio_low": _CLIPS,
    "clip_ratio_high": _CLIPS,
    "clip_ratio_c": ("vanilla",),
    "policy_loss.clip_cov_ratio": ("clip_cov",),
    "policy_loss.clip_cov_lb": ("clip_cov",),
    "policy_loss.clip_cov_ub": ("clip_cov",),
    "policy_loss.kl_cov_ratio": ("kl_cov",),
    "policy_loss.ppo_kl_coef": ("kl_cov",),
    "policy_loss.tau_pos": ("sapo",),
    "policy_loss.tau_neg": ("sapo",),
    "policy_loss.dppo_divergence": ("dppo",),
    "policy_loss.dppo_threshold": ("dppo", "dppo_tv"),
    "policy_loss.dppo_kl_threshold": ("dppo_kl",),
    "policy_loss.dro_beta": ("dro",),
}
_ASYNC = (
    "staleness_threshold",
    "max_staleness",
    "on_stale",
    "trigger_parameter_sync_step",
    "require_batches",
    "partial_rollout",
    "keep_kv_cache",
)
_LORA = ("lora_alpha", "target_modules", "exclude_modules")
_DRAFTS = (
    "speculative.num_speculative_tokens",
    "speculative.prompt_lookup_max",
    "speculative.prompt_lookup_min",
    "speculative.max_rows",
)
_DISTILLATION = (
    "teacher_models.teacher_model.model_path",
    "distillation_loss.loss_mode",
    "distillation_loss.use_task_rewards",
    "distillation_loss.distillation_loss_coef",
    "distillation_loss.use_policy_gradient",
)
_WITH_TASK_REWARDS = "distillation.distillation_loss.use_task_rewards=True"


class Part(NamedTuple):
    """Keys of one section that are read together, and the setting that turns them on."""

    section: str
    names: tuple[str, ...]
    is_read: bool
    reader: str = ""
    reason: str = ""  # in place of the reader


def unread_keys(config: TrainConfig) -> Messages:
    """Yield changed keys that nothing reads, because another key turns their part off."""
    keys = keys_of(type(config))
    for part in (
        *_switched(config),
        *_of_agents(config),
        *_chosen_by_name(config),
        *_of_schedules(config),
    ):
        if part.is_read:
            continue

        reason = part.reason or f"it is read with {part.reader} only"
        for name in part.names:
            key = keys[f"{part.section}.{name}"]
            value = value_at(config, key.path)
            if is_changed(config, key, value):
                yield f"{key.path}={value} has no effect: {reason}."


def _switched(config: TrainConfig) -> Iterator[Part]:
    """Yield parts that a switch turns on."""
    for section, names, model in (
        ("actor_rollout_ref.model", _LORA, "actor_rollout_ref.model"),
        ("actor_rollout_ref.rollout", ("lora_weights",), "actor_rollout_ref.model"),
        ("critic.model", _LORA, "critic.model"),
    ):
        has_adapters = value_at(config, f"{model}.lora_rank") > 0
        yield Part(section, names, has_adapters, f"{model}.lora_rank > 0")

    for section, names, switch in (
        ("actor_rollout_ref.actor", ("kl_loss_coef",), "actor_rollout_ref.actor.use_kl_loss"),
        ("algorithm.kl_ctrl", ("kl_coef",), "algorithm.use_kl_in_reward"),
        ("algorithm.pf_ppo", ("reweight_method", "weight_pow"), "algorithm.use_pf_ppo"),
        ("algorithm.filter_groups", ("metric",), "algorithm.filter_groups.enable"),
        ("reward_model.overlong_buffer", ("len",), "reward_model.overlong_buffer.enable"),
        ("reward_model", ("max_length", "model.path"), "reward_model.enable"),
        ("distillation", _DISTILLATION, "distillation.enabled"),
    ):
        yield Part(section, names, value_at(config, switch), f"{switch}=True")

    rollout = config.actor_rollout_ref.rollout
    drafts = rollout.speculative.method is not None
    reader = "actor_rollout_ref.rollout.speculative.method=ngram"
    yield Part("actor_rollout_ref.rollout", _DRAFTS, drafts, reader)

    pf_ppo = config.algorithm.pf_ppo
    is_pow = pf_ppo.reweight_method == "pow" or not config.algorithm.use_pf_ppo  # reported above
    reader = "algorithm.pf_ppo.reweight_method=pow"
    yield Part("algorithm.pf_ppo", ("weight_pow",), is_pow, reader)

    entropy = config.algorithm.entropy_ctrl
    reader = "algorithm.entropy_ctrl.type=adaptive"
    names = ("target_entropy", "delta")
    yield Part("algorithm.entropy_ctrl", names, entropy.type == "adaptive", reader)

    distillation = config.distillation
    has_mixture = distillation.enabled and distillation.distillation_loss.loss_mode == "jsd"
    reader = "distillation.distillation_loss.loss_mode=jsd"
    if not distillation.enabled:
        reader = f"distillation.enabled=True {reader}"
    yield Part("distillation.distillation_loss", ("jsd_beta",), has_mixture, reader)

    by_parts = config.algorithm.adv_estimator == "gdpo"
    yield Part("algorithm", ("gdpo_reward_keys",), by_parts, "algorithm.adv_estimator=gdpo")


def _of_agents(config: TrainConfig) -> Iterator[Part]:
    """Yield limits of turns and tools."""
    rollout = config.actor_rollout_ref.rollout
    section = "actor_rollout_ref.rollout.multi_turn"
    has_tools = any(rollout.multi_turn.answers[:2])
    of_tools = ("max_parallel_calls", "max_tool_response_length")
    yield Part(section, of_tools, has_tools, reason="no tools are configured")

    of_turns = ("max_assistant_turns", "max_user_turns", "max_tokens_per_turn")
    nothing = "no tools, interactions or environment are configured"
    yield Part(section, of_turns, rollout.uses_agents, reason=nothing)


def _chosen_by_name(config: TrainConfig) -> Iterator[Part]:
    """Yield parts that belong to some estimators or policy losses.

    A user's own estimator or loss may read any of them, unless another loss stands in its place.
    """
    estimator = config.algorithm.adv_estimator
    for name, readers in READ_BY_ESTIMATORS.items():
        is_read = estimator in readers or estimator not in ESTIMATORS
        reader = f"algorithm.adv_estimator={_any_of(readers)}"
        if is_read and config.distillation.is_whole_loss:
            is_read, reader = False, _WITH_TASK_REWARDS
        yield Part("algorithm", (name,), is_read, reader)

    section = "actor_rollout_ref.actor"
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    replaced = _without_policy_loss(config)
    yield Part(section, ("policy_loss.loss_mode",), replaced is None, replaced or "")
    for name, readers in READ_BY_LOSSES.items():
        is_read = loss in readers or loss not in POLICY_LOSSES
        reader = f"{section}.policy_loss.loss_mode={_any_of(readers)}"
        if is_read and replaced is not None:
            is_read, reader = False, replaced
        yield Part(section, (name,), is_read, reader)


def _without_policy_loss(config: TrainConfig) -> str | None:
    """Return the setting with which a policy loss is read; None where one is."""
    distillation = config.distillation
    if distillation.is_whole_loss and not distillation.is_reward:
        return _WITH_TASK_REWARDS
    if config.algorithm.rollout_correction.loss_type == "reinforce":
        return "algorithm.rollout_correction.loss_type=ppo_clip"
    return None


def _of_schedules(config: TrainConfig) -> Iterator[Part]:
    """Yield keys of asynchronous training, and of the schedules that fall, of every optimizer."""
    mode = config.trainer.mode
    reason = f"it is read with trainer.mode=fully_async only, got trainer.mode={mode}"
    yield Part("async_training", _ASYNC, mode == "fully_async", reason=reason)

    for section in trained_sections(config):
        optim = f"{section}.optim"
        falls = value_at(config, optim).warmup_style != "constant"
        reader = f"{optim}.warmup_style=cosine or wsd"
        yield Part(optim, ("min_lr_ratio", "num_cycles"), falls, reader)


def _any_of(names: tuple[str, ...]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
