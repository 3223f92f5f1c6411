"""Keys that nothing reads, because another key turns their part off."""

from collections.abc import Iterator
from typing import NamedTuple

from verl.config.choices import ESTIMATORS, POLICY_LOSSES
from verl.config.keys import is_changed, is_inherited, keys_of, value_at
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
}


class Part(NamedTuple):
    """Keys of one section that are read together, and the setting that turns them on."""

    section: str
    names: tuple[str, ...]
    is_read: bool
    reader: str


def unread_keys(config: TrainConfig) -> Iterator[str]:
    """Yield changed keys that nothing reads, because another key turns their part off."""
    keys = keys_of(type(config))
    for part in (*_switched(config), *_chosen_by_name(config), *_of_schedules(config)):
        if part.is_read:
            continue

        for name in part.names:
            key = keys[f"{part.section}.{name}"]
            value = value_at(config, key.path)
            if is_changed(key, value) and not is_inherited(config, key, value):
                yield f"{key.path}={value} has no effect: it is read with {part.reader} only."


def _switched(config: TrainConfig) -> Iterator[Part]:
    """Yield parts that a switch turns on."""
    roles = config.actor_rollout_ref
    algorithm = config.algorithm
    rewards = config.reward_model

    lora_keys = ("lora_alpha", "target_modules", "exclude_modules")
    has_adapters = roles.model.lora_rank > 0
    lora = "actor_rollout_ref.model.lora_rank > 0"
    yield Part("actor_rollout_ref.model", lora_keys, has_adapters, lora)
    yield Part("actor_rollout_ref.rollout", ("lora_weights",), has_adapters, lora)
    yield Part(
        "critic.model",
        lora_keys,
        config.critic.model.lora_rank > 0,
        "critic.model.lora_rank > 0",
    )

    for section, names, is_read, switch in (
        (
            "actor_rollout_ref.actor",
            ("kl_loss_coef",),
            roles.actor.use_kl_loss,
            "actor_rollout_ref.actor.use_kl_loss",
        ),
        (
            "algorithm.kl_ctrl",
            ("kl_coef",),
            algorithm.use_kl_in_reward,
            "algorithm.use_kl_in_reward",
        ),
        (
            "algorithm.filter_groups",
            ("metric",),
            algorithm.filter_groups.enable,
            "algorithm.filter_groups.enable",
        ),
        (
            "reward_model.overlong_buffer",
            ("len",),
            rewards.overlong_buffer.enable,
            "reward_model.overlong_buffer.enable",
        ),
        ("reward_model", ("max_length",), rewards.enable, "reward_model.enable"),
    ):
        yield Part(section, names, is_read, f"{switch}=True")


def _chosen_by_name(config: TrainConfig) -> Iterator[Part]:
    """Yield parts that belong to some estimators or policy losses.

    A user's own estimator or loss may read any of them.
    """
    estimator = config.algorithm.adv_estimator
    for name, readers in READ_BY_ESTIMATORS.items():
        is_read = estimator in readers or estimator not in ESTIMATORS
        yield Part("algorithm", (name,), is_read, f"algorithm.adv_estimator={_any_of(readers)}")

    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    for name, readers in READ_BY_LOSSES.items():
        is_read = loss in readers or loss not in POLICY_LOSSES
        reader = f"actor_rollout_ref.actor.policy_loss.loss_mode={_any_of(readers)}"
        yield Part("actor_rollout_ref.actor", (name,), is_read, reader)


def _of_schedules(config: TrainConfig) -> Iterator[Part]:
    """Yield keys of the cosine schedule, for every optimizer of the run."""
    optims = {"actor_rollout_ref.actor.optim": config.actor_rollout_ref.actor.optim}
    if config.needs_critic:
        optims["critic.optim"] = config.critic.optim
    for section, optim in optims.items():
        is_cosine = optim.warmup_style == "cosine"
        reader = f"{section}.warmup_style=cosine"
        yield Part(section, ("min_lr_ratio", "num_cycles"), is_cosine, reader)


def _any_of(names: tuple[str, ...]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
