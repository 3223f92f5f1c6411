"""The functions of verl 0.5's `core_algos` with its parameter names and return orders, for users' recipes.

Padded (B, R) tensors in, aggregated numbers out. Each is one call into this room.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from verl.algorithms.advantages import AdvantageInputs, gae
from verl.algorithms.group_advantages import group_ids, grpo_advantages
from verl.algorithms.kl import AdaptiveKLController as AdaptiveKLController
from verl.algorithms.kl import FixedKLController as FixedKLController
from verl.algorithms.kl import get_kl_controller as get_kl_controller
from verl.algorithms.kl import kl_penalty as kl_penalty
from verl.algorithms.masked import agg_loss as agg_loss
from verl.algorithms.masked import aggregation_weights, masked_mean
from verl.algorithms.policy_losses import PolicyLossInputs, vanilla
from verl.algorithms.value_losses import clipped_value_loss
from verl.utils.errors import ConfigError

Scalar = Float[Tensor, ""]


def compute_gae_advantage_return(
    token_level_rewards: Float[Tensor, "B R"],
    values: Float[Tensor, "B R"],
    response_mask: Shaped[Tensor, "B R"],
    gamma: Any,
    lam: Any,
) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """(advantages, returns) of `advantages.gae`."""
    inputs = AdvantageInputs(token_level_rewards, response_mask, values=values, gamma=float(gamma), lam=float(lam))
    return gae(inputs)


def compute_grpo_outcome_advantage(
    token_level_rewards: Float[Tensor, "B R"],
    response_mask: Shaped[Tensor, "B R"],
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """(advantages, returns) of `group_advantages.grpo`; `index` names each row's prompt, `config` is not read."""
    scores = token_level_rewards.sum(-1)
    advantages = grpo_advantages(
        scores, group_ids(index).to(scores.device), norm_by_std=norm_adv_by_std_in_grpo, epsilon=epsilon
    )
    tokens = torch.where(response_mask.bool(), advantages[:, None], 0.0)
    return tokens, tokens.clone()


def compute_policy_loss(
    old_log_prob: Float[Tensor, "B R"],
    log_prob: Float[Tensor, "B R"],
    advantages: Float[Tensor, "B R"],
    response_mask: Shaped[Tensor, "B R"],
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    """(pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower) of `policy_losses.vanilla`."""
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ConfigError("compute_policy_loss needs cliprange, or both cliprange_low and cliprange_high.")
    keep = response_mask.bool()
    weights = aggregation_weights(response_mask, loss_agg_mode)
    rows = torch.arange(len(keep), device=keep.device)[:, None].expand_as(keep)
    inputs = PolicyLossInputs(log_prob[keep], old_log_prob[keep], advantages[keep], weights[keep], rows[keep])
    output = vanilla(inputs, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=clip_ratio_c)
    clipfrac, lower, kl = (_mean(output.means[name]) for name in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"))
    return output.loss, clipfrac, kl, lower


def compute_value_loss(
    vpreds: Float[Tensor, "B R"],
    returns: Float[Tensor, "B R"],
    values: Float[Tensor, "B R"],
    response_mask: Shaped[Tensor, "B R"],
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
) -> tuple[Scalar, Scalar]:
    """(vf_loss, vf_clipfrac) of `value_losses.clipped_value_loss`."""
    keep = response_mask.bool()
    weights = aggregation_weights(response_mask, loss_agg_mode)
    output = clipped_value_loss(
        vpreds[keep], values[keep], returns[keep], weights[keep], cliprange_value=cliprange_value
    )
    return output.loss, _mean(output.means["vf_clipfrac"])


def compute_entropy_loss(
    logits: Float[Tensor, "B R V"], response_mask: Shaped[Tensor, "B R"], loss_agg_mode: str = "token-mean"
) -> Scalar:
    """Aggregated entropy of softmax(logits): H = logsumexp(z) - sum over v of p_v z_v."""
    entropy = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
    return agg_loss(entropy, response_mask, loss_agg_mode)


def _mean(values: Float[Tensor, " N"]) -> Scalar:
    return masked_mean(values, torch.ones_like(values))
