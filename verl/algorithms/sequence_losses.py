"""Policy losses whose ratio is that of a whole response. They are written for
loss_agg_mode=seq-mean-token-mean."""

from typing import Any

import torch

from verl.algorithms.advantages import formula
from verl.algorithms.kl import cut_log_ratio
from verl.algorithms.policy_losses import (
    PolicyLossInputs,
    PolicyLossOutput,
    clipped_surrogate,
    output_of,
    policy_losses,
)


@policy_losses.register("gspo")
@formula(
    "max(-s A, -A clip(s, 1 - {clip_ratio_low}, 1 + {clip_ratio_high})), s = exp(mean of log r "
    "over the response)"
)
def gspo(
    inputs: PolicyLossInputs, *, clip_ratio_low: float, clip_ratio_high: float, **_: Any
) -> PolicyLossOutput:
    """Group sequence policy optimization, eqs. (13) and (14) of Zheng et al. 2025
    (arXiv:2507.18071).

        s_i  = (pi(y_i) / pi_old(y_i))^(1 / |y_i|) = exp(mean over t of log r_it)
        s_it = sg(s_i) pi_it / sg(pi_it)    (sg: no gradient through it)
        L_it = max(-A_it s_it, -A_it clip(s_it, 1 - low, 1 + high))

    Where a response's tokens have one advantage and one weight, this is the gradient of max(-A s_i,
    -A clip(s_i)). The paper takes low = 3e-4 and high = 4e-4.
    """
    mean = inputs.sequence_mean(inputs.log_probs.detach() - inputs.old_log_probs)
    mean = cut_log_ratio(mean.to(inputs.log_probs.dtype))
    own_log_probs = torch.where(inputs.own, inputs.log_probs, 0.0)
    ratio = (mean + own_log_probs - own_log_probs.detach()).exp()
    losses, is_clipped = clipped_surrogate(
        ratio, inputs.advantages, clip_ratio_low, clip_ratio_high
    )
    return output_of(inputs, losses, is_clipped)


@policy_losses.register("geo_mean")
@formula(
    "-A exp(mean over the response of log r, clipped to [-{clip_ratio_low}, {clip_ratio_high}] on "
    "the side of A)"
)
def geo_mean(
    inputs: PolicyLossInputs, *, clip_ratio_low: float, clip_ratio_high: float, **_: Any
) -> PolicyLossOutput:
    """Geometric-mean policy optimization (GMPO), Zhao et al. 2025 (arXiv:2507.20673). With l = log
    r, z = sgn A:

        L_i = -A_i exp(z_i mean over t of min(z_i l_it, z_i clip(l_it, -low, high)))

    for every token of the response. The clip is of the logarithm: the paper's (e^-0.4, e^0.4) is
    low = high = 0.4. Where advantages differ within a response (gae), A_i is their mean and z that
    of each token.
    """
    log_ratio = inputs.log_ratio()
    sign = inputs.advantages.sign()
    plain = sign * log_ratio
    bounded = torch.minimum(plain, sign * log_ratio.clamp(-clip_ratio_low, clip_ratio_high))
    ratio = inputs.sequence_mean(sign * bounded).exp()
    losses = -inputs.sequence_mean(inputs.advantages) * ratio
    return output_of(inputs, losses, bounded < plain)
