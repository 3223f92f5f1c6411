"""Losses of the critic on packed tokens."""

import torch
from jaxtyping import Float
from torch import Tensor

from verl.algorithms.policy_losses import PolicyLossOutput


def clipped_value_loss(
    values: Float[Tensor, " N"],
    old_values: Float[Tensor, " N"],
    returns: Float[Tensor, " N"],
    weights: Float[Tensor, " N"],
    *,
    cliprange_value: float,
) -> PolicyLossOutput:
    """Compute the value loss with PPO's clipping around the old values.

        L = 0.5 max((V - ret)^2, (clip(V, V_old - range, V_old + range) - ret)^2)

    Means: `vf_clipfrac`, the share of tokens where the clipped term counts; `vpred_mean`, the
        value.
    """
    clipped_values = torch.minimum(
        torch.maximum(values, old_values - cliprange_value), old_values + cliprange_value
    )
    unclipped = (values - returns) ** 2
    clipped = (clipped_values - returns) ** 2
    losses = 0.5 * torch.maximum(unclipped, clipped)
    means = {"vf_clipfrac": (clipped > unclipped).to(losses.dtype), "vpred_mean": values.detach()}
    return PolicyLossOutput(loss=(losses * weights).sum(), means=means)
