"""How the keys about micro-batches are read: a fixed number of rows, or a budget of tokens."""

from typing import NamedTuple

from verl.config.actor import ActorConfig
from verl.config.critic import CriticConfig
from verl.config.distillation import DistillationConfig
from verl.config.ref import RefConfig
from verl.config.reward import RewardModelConfig
from verl.config.rollout import RolloutConfig


class MicroBatch(NamedTuple):
    """Size of a pass: responses, or a budget of tokens.

    If neither is set, as many tokens as the device has room for.
    """

    max_tokens: int | None
    rows: int | None


def update_micro_batch(role: ActorConfig | CriticConfig) -> MicroBatch:
    """Return the size of forward-backward passes."""
    return _choose(
        role.use_dynamic_bsz, role.ppo_micro_batch_size_per_gpu, role.ppo_max_token_len_per_gpu
    )


def log_prob_micro_batch(role: RolloutConfig | RefConfig | DistillationConfig) -> MicroBatch:
    """Return the size of forward passes for log-probs: old (rollout), reference or teacher."""
    return _choose(
        role.log_prob_use_dynamic_bsz,
        role.log_prob_micro_batch_size_per_gpu,
        role.log_prob_max_token_len_per_gpu,
    )


def value_micro_batch(critic: CriticConfig) -> MicroBatch:
    """Return the size of forward passes for values."""
    return _choose(
        critic.use_dynamic_bsz,
        critic.forward_micro_batch_size_per_gpu,
        critic.forward_max_token_len_per_gpu,
    )


def reward_micro_batch(role: RewardModelConfig) -> MicroBatch:
    """Return the size of forward passes of the reward model."""
    return _choose(
        role.use_dynamic_bsz, role.micro_batch_size_per_gpu, role.forward_max_token_len_per_gpu
    )


def _choose(by_tokens: bool | None, rows: int | None, max_tokens: int | None) -> MicroBatch:
    # use_dynamic_bsz=False without a number of rows still means tokens: there is always a working
    # micro-batch.
    if by_tokens or rows is None:
        return MicroBatch(max_tokens, None)
    return MicroBatch(None, rows)
