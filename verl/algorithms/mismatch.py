"""Measure how far the rollout engine's log-probs are from the trainer's.

`rollout_correction` corrects the update for the difference.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from verl.algorithms.kl import cut_log_ratio, kl_penalty


def mismatch_metrics(
    rollout_log_probs: Float[Tensor, "*tokens"],
    log_probs: Float[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
) -> dict[str, float]:
    """Compute metrics of the mismatch over the tokens under the mask.

    With p the rollout's and q the trainer's probability:

    training/rollout_probs_diff_max, _mean, _std: of |p - q|
    training/rollout_kl, rollout_kl_k3: k1 and k3 estimates of KL(rollout || trainer), nats a token
    training/rollout_ess: (sum w)^2 / (n sum w^2), w = q / p: the effective share of the n tokens
        under importance weighting, 1 without mismatch
    """
    keep = mask.bool()
    drawn = rollout_log_probs[keep].double()
    trained = log_probs[keep].double()
    if not drawn.numel():
        raise ValueError(
            "Rollout mismatch needs at least one response token, got a batch without any."
        )

    difference = (drawn.exp() - trained.exp()).abs()
    weights = cut_log_ratio(trained - drawn).exp()
    metrics = {
        "training/rollout_probs_diff_max": difference.max(),
        "training/rollout_probs_diff_mean": difference.mean(),
        "training/rollout_probs_diff_std": difference.std(unbiased=False),
        "training/rollout_kl": kl_penalty(drawn, trained, "k1").mean(),
        "training/rollout_kl_k3": kl_penalty(drawn, trained, "k3").mean(),
        "training/rollout_ess": weights.sum().square() / (weights.numel() * weights.square().sum()),
    }
    # one wait for the device
    return dict(zip(metrics, torch.stack(list(metrics.values())).tolist()))
