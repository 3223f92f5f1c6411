"""Policy losses that keep the entropy up, Cui et al. 2025 (arXiv:2505.22617).

With means over all response tokens of the mini-batch, those of all ranks:

    Cov_t = (log pi_t - mean(log pi)) (A_t - mean(A))

A large covariance makes the policy sharper. Tokens are selected before the update, by log-probs of
the whole mini-batch (`selections`), so that the loss does not depend on micro-batches.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl.algorithms.advantages import formula
from verl.algorithms.kl import cut_log_ratio
from verl.algorithms.policy_losses import (
    PolicyLossInputs,
    PolicyLossOutput,
    SelectionInputs,
    clipped_surrogate,
    output_of,
    policy_losses,
    selections,
)

KINK_WIDTH = 1e-4  # of log r: rounding of two passes in fp32 stays below it


def covariances(
    log_probs: Float[Tensor, " M"], advantages: Float[Tensor, " M"]
) -> Float[Tensor, " M"]:
    """Compute Cov_t of each token, in float64."""
    log_probs = log_probs.double()
    advantages = advantages.double()
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


@selections.register("clip_cov")
def select_within_band(
    inputs: SelectionInputs,
    *,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
    clip_ratio_low: float,
    clip_ratio_high: float,
    **_: Any,
) -> Bool[Tensor, " M"]:
    """Draw max(1, clip_cov_ratio * M) tokens with lb < Cov < ub and a gradient under PPO's clip."""
    ratio = cut_log_ratio(inputs.log_probs - inputs.old_log_probs).exp()
    is_clipped = torch.where(
        inputs.advantages > 0, ratio > 1 + clip_ratio_high, ratio < 1 - clip_ratio_low
    )
    covariance = covariances(inputs.log_probs, inputs.advantages)
    candidates = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & ~is_clipped
    count = max(1, int(clip_cov_ratio * len(candidates)))
    ranked = torch.where(candidates, inputs.noise.double(), -torch.inf)
    return _largest(ranked, inputs.noise, count)


@selections.register("kl_cov")
def select_largest(inputs: SelectionInputs, *, kl_cov_ratio: float, **_: Any) -> Bool[Tensor, " M"]:
    """Select the max(1, kl_cov_ratio * M) tokens of the largest Cov."""
    covariance = covariances(inputs.log_probs, inputs.advantages)
    return _largest(covariance, inputs.noise, max(1, int(kl_cov_ratio * len(covariance))))


def _largest(
    values: Float[Tensor, " M"], noise: Float[Tensor, " M"], count: int
) -> Bool[Tensor, " M"]:
    """Mark the `count` largest values, of equal ones those with the largest noise; never -inf."""
    ascending = np.lexsort((noise.cpu().numpy(), values.cpu().numpy()))
    order = ascending[::-1][:count]
    chosen = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    chosen[torch.from_numpy(order.copy()).to(values.device)] = True
    return chosen & values.isfinite()


@policy_losses.register("clip_cov")
@formula(
    "max(-r A, -A clip(r, 1 - {clip_ratio_low}, 1 + {clip_ratio_high})), 0 for {clip_cov_ratio} of "
    "the tokens, drawn among those with covariance in ({clip_cov_lb}, {clip_cov_ub})"
)
def clip_cov(
    inputs: PolicyLossInputs, *, clip_ratio_low: float, clip_ratio_high: float, **_: Any
) -> PolicyLossOutput:
    """Clip-Cov: PPO's clipped loss, without the selected tokens, which still count in the mean."""
    ratio = inputs.log_ratio().exp()
    selected = _selected(inputs)
    losses, is_clipped = clipped_surrogate(
        ratio, inputs.advantages, clip_ratio_low, clip_ratio_high
    )
    return output_of(inputs, torch.where(selected, 0.0, losses), is_clipped | selected)


@policy_losses.register("kl_cov")
@formula(
    "-r A, + {ppo_kl_coef} |log r| for {kl_cov_ratio} of the tokens, those of the largest "
    "covariance"
)
def kl_cov(inputs: PolicyLossInputs, *, ppo_kl_coef: float, **_: Any) -> PolicyLossOutput:
    """Compute KL-Cov: L = -r A, without clip, plus ppo_kl_coef |log r| on the selected tokens.

    |log r| has its kink at r = 1. Where old log-probs come from a separate pass, the sign of log r
    before the first update is rounding, which differs with the number of ranks. So the penalty has
    no gradient where |log r| < 1e-4.
    """
    log_ratio = inputs.log_ratio()
    selected = _selected(inputs)
    distance = log_ratio.abs()
    distance = torch.where(distance < KINK_WIDTH, distance.detach(), distance)
    penalty = torch.where(selected, ppo_kl_coef * distance, 0.0)
    losses = -inputs.advantages * log_ratio.exp() + penalty
    return output_of(inputs, losses, selected)


def _selected(inputs: PolicyLossInputs) -> Bool[Tensor, " N"]:
    assert inputs.selected is not None, "the selection of a loss runs before it"
    return inputs.selected.bool()
