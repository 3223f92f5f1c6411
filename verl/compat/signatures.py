"""The functions of verl 0.5's `core_algos`, with its parameter names and return orders.

They take padded (B, R) tensors. Each is one call into `verl.algorithms`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from verl.algorithms.advantages import AdvantageInputs, gae
from verl.algorithms.group_advantages import (
    gpg_advantages,
    group_ids,
    grpo_advantages,
    opo,
    passk_advantages,
    reinforce_plus_plus_baseline,
    rloo,
)
from verl.algorithms.kl import kl_penalty as estimated_kl
from verl.algorithms.masked import agg_loss, aggregation_weights
from verl.algorithms.padded import Scalar, mean_of, padded_loss, padded_signature, setting_of
from verl.algorithms.reinforce import reinforce_plus_plus, remax
from verl.algorithms.value_losses import clipped_value_loss
from verl.compat.tensors import entropy_from_logits
from verl.utils.errors import ConfigError

Padded = Float[Tensor, "B R"]
Mask = Shaped[Tensor, "B R"]
PerRow = Float[Tensor, " B"]
Tokens = Float[Tensor, "*tokens"]
Advantages = tuple[Padded, Padded]
Index = np.ndarray | Tensor | Sequence[Any]  # the prompt of each row: identifiers of any kind


def compute_gae_advantage_return(
    token_level_rewards: Padded,
    values: Padded,
    response_mask: Mask,
    gamma: Any,
    lam: Any,
) -> Advantages:
    """Return (advantages, returns) of `advantages.gae`."""
    inputs = AdvantageInputs(
        token_level_rewards, response_mask, values=values, gamma=float(gamma), lam=float(lam)
    )
    return gae(inputs)


def compute_grpo_outcome_advantage(
    token_level_rewards: Padded,
    response_mask: Mask,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Advantages:
    """Return (advantages, returns) of `group_advantages.grpo`.

    `index` names each row's prompt; `config` is ignored.
    """
    scores, group = _scores_and_group(token_level_rewards, index)
    advantages = grpo_advantages(
        scores, group, norm_by_std=norm_adv_by_std_in_grpo, epsilon=epsilon
    )
    return _on_tokens(advantages, response_mask)


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Padded,
    response_mask: Mask,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """Return (advantages, returns) of `group_advantages.grpo_passk`.

    `norm_adv_by_std_in_grpo` of `config`, a mapping or a section, overrides the argument.
    """
    scores, group = _scores_and_group(token_level_rewards, index)
    norm_by_std = setting_of(config, "norm_adv_by_std_in_grpo", norm_adv_by_std_in_grpo)
    advantages = passk_advantages(scores, group, norm_by_std=bool(norm_by_std), epsilon=epsilon)
    return _on_tokens(advantages, response_mask)


def _by_index(estimator: Callable[[AdvantageInputs], Advantages]) -> Callable[..., Advantages]:
    def compute(
        token_level_rewards: Padded,
        response_mask: Mask,
        index: Index,
        epsilon: float = 1e-6,
        config: Any = None,
        **kwargs: Any,
    ) -> Advantages:
        _, group = _scores_and_group(token_level_rewards, index)
        return estimator(AdvantageInputs(token_level_rewards, response_mask, group=group))

    compute.__name__ = compute.__qualname__ = f"compute_{estimator.__name__}_outcome_advantage"
    compute.__doc__ = (
        f"Return (advantages, returns) of `{estimator.__name__}`; `epsilon` is "
        f"ignored.\n\n{estimator.__doc__}"
    )
    return compute


compute_rloo_outcome_advantage = _by_index(rloo)
compute_opo_outcome_advantage = _by_index(opo)
compute_reinforce_plus_plus_baseline_outcome_advantage = _by_index(reinforce_plus_plus_baseline)


def compute_gpg_outcome_advantage(
    token_level_rewards: Padded,
    response_mask: Mask,
    index: Index,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """Return (advantages, returns) of `group_advantages.gpg`; `epsilon` is ignored."""
    scores, group = _scores_and_group(token_level_rewards, index)
    advantages = gpg_advantages(scores, group, f_norm=f_norm, alpha=alpha)
    return _on_tokens(advantages, response_mask)


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Padded,
    response_mask: Mask,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """Return (advantages, returns) of `reinforce.reinforce_plus_plus`.

    The discount is `config.gamma`, or 1 without a config.
    """
    if config is None:
        gamma = 1.0
    elif isinstance(config, Mapping):
        gamma = float(config["gamma"])
    else:
        gamma = float(config.gamma)
    return reinforce_plus_plus(AdvantageInputs(token_level_rewards, response_mask, gamma=gamma))


def compute_remax_outcome_advantage(
    token_level_rewards: Padded,
    reward_baselines: PerRow,
    response_mask: Mask,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """Return (advantages, returns) of `reinforce.remax`."""
    columns = {"reward_baselines": reward_baselines}
    return remax(AdvantageInputs(token_level_rewards, response_mask, columns=columns))


def compute_policy_loss(
    old_log_prob: Padded,
    log_prob: Padded,
    advantages: Padded,
    response_mask: Mask,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    """Return (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower) of `policy_losses.vanilla`."""
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ConfigError(
            "compute_policy_loss needs cliprange, or both cliprange_low and cliprange_high."
        )
    settings = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": clip_ratio_c}
    return padded_loss(
        "vanilla", old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, settings
    )


compute_policy_loss_gpg = padded_signature("gpg")
compute_policy_loss_clip_cov = padded_signature("clip_cov")
compute_policy_loss_kl_cov = padded_signature("kl_cov")
compute_policy_loss_gspo = padded_signature("gspo")


def compute_value_loss(
    vpreds: Padded,
    returns: Padded,
    values: Padded,
    response_mask: Mask,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
) -> tuple[Scalar, Scalar]:
    """Return (vf_loss, vf_clipfrac) of `value_losses.clipped_value_loss`."""
    keep = response_mask.bool()
    weights = aggregation_weights(response_mask, loss_agg_mode)
    output = clipped_value_loss(
        vpreds[keep], values[keep], returns[keep], weights[keep], cliprange_value=cliprange_value
    )
    return output.loss, mean_of(output.means["vf_clipfrac"])


def compute_entropy_loss(
    logits: Float[Tensor, "B R V"],
    response_mask: Mask,
    loss_agg_mode: str = "token-mean",
) -> Scalar:
    """Aggregate the entropy of softmax(logits), see `tensors.entropy_from_logits`."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)


def kl_penalty(logprob: Tokens, ref_logprob: Tokens, kl_penalty: str) -> Tokens:
    """Return the KL of each token by the estimator that `kl_penalty` names; see `kl.kl_penalty`."""
    return estimated_kl(logprob, ref_logprob, kl_penalty)


def compute_rewards(
    token_level_scores: Padded,
    old_log_prob: Padded,
    ref_log_prob: Padded,
    kl_ratio: float,
) -> Padded:
    """Subtract `kl_ratio` times the KL of each token (k1: old minus reference log-prob)."""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)


def _scores_and_group(
    token_level_rewards: Padded, index: Index
) -> tuple[PerRow, Int[Tensor, " B"]]:
    return token_level_rewards.sum(-1), group_ids(index).to(token_level_rewards.device)


def _on_tokens(advantages: PerRow, response_mask: Mask) -> Advantages:
    tokens = torch.where(response_mask.bool(), advantages[:, None], 0.0)
    return tokens, tokens.clone()
