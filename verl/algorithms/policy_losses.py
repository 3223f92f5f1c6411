"""Losses of the policy on packed tokens, their registry, and the registry of extra loss terms.

N packed response tokens, of one micro-batch or of many: a loss is a weighted sum over tokens, whose weights have the
denominators of the whole mini-batch (`masked.aggregation_weights`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl.algorithms.kl import MAX_LOG_RATIO
from verl.utils.errors import ConfigError
from verl.utils.registry import Registry


class PolicyLossInputs(NamedTuple):
    log_probs: Float[Tensor, " N"]  # of the current policy, with gradient
    old_log_probs: Float[Tensor, " N"]  # of the policy that the ratio is taken against
    advantages: Float[Tensor, " N"]
    weights: Float[Tensor, " N"]  # 0 on tokens that the model did not make
    sequence: Int[Tensor, " N"]  # which row a token belongs to


class PolicyLossOutput(NamedTuple):
    loss: Float[Tensor, ""]
    means: dict[str, Float[Tensor, " N"]]  # to be averaged over the response tokens of the mini-batch


# name -> loss(PolicyLossInputs, **settings) -> PolicyLossOutput. The settings are all numbers of the actor's section;
# a loss names those that it reads and takes the others as `**_`.
policy_losses: Registry[Callable[..., PolicyLossOutput]] = Registry("policy loss (actor.policy_loss.loss_mode)")

# name -> term(PolicyLossInputs, the micro-batch's other packed columns) -> scalar, added times its coefficient. To be
# independent of micro-batching it is a sum over tokens times `weights`, as the policy loss is.
ExtraLoss = Callable[[PolicyLossInputs, Mapping[str, Tensor]], Tensor]
extra_losses: Registry[ExtraLoss] = Registry("extra loss term")


@policy_losses.register("vanilla")
def vanilla(
    inputs: PolicyLossInputs, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float, **_: Any
) -> PolicyLossOutput:
    """Clipped policy loss, eq. (7) of Schulman et al. 2017 (arXiv:1707.06347), with the dual clip of eq. (5) of Ye et
    al. 2020 (arXiv:1912.09729). With the ratio r = pi / pi_old of a token:

        L_clip = max(-A r, -A clip(r, 1 - low, 1 + high))
        L = min(L_clip, -A c)  where A < 0,  else L_clip

    low = high is PPO's epsilon; high > low is the clip-higher of DAPO. `ppo_kl` is the k1 estimate of KL(old || new).
    """
    if clip_ratio_c <= 1.0:
        raise ConfigError(f"clip_ratio_c must be greater than 1, got {clip_ratio_c}. The paper takes 3.")
    log_ratio = (inputs.log_probs - inputs.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, advantages = log_ratio.exp(), inputs.advantages
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    bounded = torch.maximum(unclipped, clipped)
    ceiling = -advantages * clip_ratio_c
    negative = advantages < 0
    losses = torch.where(negative, torch.minimum(bounded, ceiling), bounded)
    means = {
        "pg_clipfrac": (clipped > unclipped).to(losses.dtype),
        "pg_clipfrac_lower": (negative & (bounded > ceiling)).to(losses.dtype),
        "ppo_kl": -log_ratio.detach(),
    }
    return PolicyLossOutput(loss=(losses * inputs.weights).sum(), means=means)
