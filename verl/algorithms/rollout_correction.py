"""Correct for tokens that the rollout engine drew with slightly other probabilities.

mu is the rollout's and pi the trainer's probability of the drawn tokens before the update. With
rho_t = pi_t / mu_t:

    token      w_it = rho_it
    sequence   w_it = product over t of rho_it          unbiased, large variance for long responses
    geometric  w_it = exp(mean over t of log rho_it)    for rejection only: mismatch per token
    k3         w_it = mean over t of rho_it - 1 - log rho_it    for rejection only: KL(mu || pi)
"""

from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from verl.algorithms.kl import cut_log_ratio
from verl.algorithms.masked import masked_mean, masked_sum
from verl.algorithms.policy_losses import (
    PolicyLossInputs,
    PolicyLossOutput,
    output_of,
)
from verl.utils.errors import ConfigError


class RolloutCorrection(NamedTuple):
    # factors of the policy loss of each token; 0 outside `mask`
    weights: Float[Tensor, "B R"]
    mask: Bool[Tensor, "B R"]  # the response mask without the rejected tokens
    metrics: dict[str, float]


def importance_ratios(
    old_log_probs: Float[Tensor, "B R"],
    rollout_log_probs: Float[Tensor, "B R"],
    response_mask: Shaped[Tensor, "B R"],
    level: str,
) -> Float[Tensor, "B R"]:
    """Compute w of every token by `level`, logarithms cut at 20; 0 outside the mask."""
    mask = response_mask.bool()
    log_ratio = torch.where(mask, old_log_probs - rollout_log_probs, 0.0).double()
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True)
    elif level == "geometric":
        log_ratio = masked_mean(log_ratio, mask, -1)[:, None]
    elif level == "k3":
        bounded = cut_log_ratio(log_ratio)
        divergence = masked_mean(bounded.exp() - 1 - bounded, mask, -1)[:, None]
        return torch.where(mask, divergence, 0.0)
    elif level != "token":
        raise ConfigError(
            f"Importance ratios are taken by token, sequence, geometric or k3, got '{level}'."
        )

    return torch.where(mask, cut_log_ratio(log_ratio).exp(), 0.0)


def correct_rollout(
    old_log_probs: Float[Tensor, "B R"],
    rollout_log_probs: Float[Tensor, "B R"],
    response_mask: Shaped[Tensor, "B R"],
    *,
    weigh_by: str | None = None,
    weight_band: tuple[float, float] = (0.0, 2.0),
    outside: str = "truncate",
    normalize: bool = False,
    reject_by: str | None = None,
    accept_band: tuple[float, float] = (0.5, 2.0),
    veto_below: float | None = None,
) -> RolloutCorrection:
    """Compute weights and rejections of a batch.

    weigh_by, with `outside="truncate"`: truncated importance sampling, w = min(rho, upper), by
        token (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
        training") or by sequence; a lower bound lifts.
    weigh_by, with `outside="mask"`: w = rho within the band and 0 outside (IcePop, Ling team 2025,
        arXiv:2510.18855). Tokens outside still count in the loss's mean.
    normalize: divide the weights by their mean over the tokens of the batch.
    reject_by: tokens (token) or whole responses (sequence, geometric, k3) whose ratio lies outside
        `accept_band` leave the mask, as though they had not been drawn.
    veto_below: responses with a token whose rho is below it leave the mask.

    Metrics, over the response tokens: `rollout_corr/kl` and `k3_kl` of KL(mu || pi) in nats a
    token; `chi2_token` and `chi2_seq`, E[rho^2] - 1; `ess`, the share of tokens that weigh as much
    as all do; `weight_mean`, `_max`, and the shares `weight_outside`, `rejected_tokens` and
    `rejected_seqs`.
    """
    given = response_mask.bool()

    @cache
    def ratios_by(level: str) -> Float[Tensor, "B R"]:
        return importance_ratios(old_log_probs, rollout_log_probs, given, level)

    mask = given.clone()
    if reject_by is not None:
        ratios = ratios_by(reject_by)
        mask &= (ratios >= accept_band[0]) & (ratios <= accept_band[1])
    tokens = ratios_by("token")
    if veto_below is not None:
        mask &= ~(given & (tokens < veto_below)).any(-1, keepdim=True)

    weights = mask.double()
    outside_share = 0.0
    if weigh_by is not None:
        bounded, inside = bounded_weights(ratios_by(weigh_by), weight_band, outside)
        weights = torch.where(mask, bounded, 0.0)
        outside_share = masked_mean((~inside).double(), mask).item()
        if normalize:
            weights = weights / masked_mean(weights, mask).clamp(min=1e-30)

    metrics = _metrics(old_log_probs, rollout_log_probs, given, tokens) if given.any() else {}
    metrics |= {
        "rollout_corr/ess": (
            weights.sum() ** 2 / (mask.sum() * (weights**2).sum()).clamp(min=1e-30)
        ).item(),
        "rollout_corr/weight_mean": masked_mean(weights, mask).item(),
        "rollout_corr/weight_max": weights.max().item() if weights.numel() else 0.0,
        "rollout_corr/weight_outside": outside_share,
        "rollout_corr/rejected_tokens": masked_mean((~mask).double(), given).item(),
        "rollout_corr/rejected_seqs": masked_mean((~mask.any(-1)).double(), given.any(-1)).item(),
    }
    return RolloutCorrection(weights.to(old_log_probs.dtype), mask, metrics)


def loglinear_proximal(
    log_probs: Float[Tensor, "*tokens"],
    rollout_log_probs: Float[Tensor, "*tokens"],
    age: Shaped[Tensor, "*tokens"],
) -> Float[Tensor, "*tokens"]:
    """Estimate the log-probs before the update without a pass, for the decoupled objective.

    They lie on the line from the weights that drew a token to those that are updated, which are
    `age` and one version more ahead (Fu et al. 2025, "AReaL", arXiv:2505.24298, the decoupled
    objective; the interpolation is its `prox_logp_method=loglinear`):

        log pi_old = log mu + age / (age + 1) * (log pi - log mu)

    A token of the present version has age 0, and pi_old = mu.
    """
    share = age.clamp(min=0) / (age.clamp(min=0) + 1.0)
    return rollout_log_probs + share * (log_probs.detach() - rollout_log_probs)


def reinforce_of_rollout(
    inputs: PolicyLossInputs,
    *,
    weigh_by: str | None,
    weight_band: tuple[float, float],
    outside: str,
) -> PolicyLossOutput:
    """Policy gradient with explicit importance weights, for old log-probs that are the rollout's.

        L = -sg(w) A log pi,    w = pi / mu of the token or of its response    (sg: no gradient)

    w is of the policy that is updated, so it stays right over several updates of one batch. A
    weight outside the band becomes the bound (truncate) or 0 (mask); `pg_clipfrac` is their share.

    Args:
        weigh_by: token, sequence, or None for weights of 1.
        weight_band: smallest and largest weight.
        outside: truncate or mask.
    """
    plain = -inputs.advantages * inputs.log_probs
    if weigh_by is None:
        return output_of(inputs, plain)

    log_ratio = inputs.log_probs.detach() - inputs.old_log_probs
    log_ratio = torch.where(inputs.own, log_ratio, 0.0).double()
    if weigh_by == "sequence":
        log_ratio = inputs.sequence_sum(log_ratio)
    ratios = cut_log_ratio(log_ratio).exp()
    bounded, inside = bounded_weights(ratios, weight_band, outside)
    weights = bounded.to(plain.dtype)

    output = output_of(inputs, weights * plain, clipped=~inside)
    output.means["rollout_is_weight"] = weights
    return output


def bounded_weights(
    ratios: Float[Tensor, "*tokens"], band: tuple[float, float], outside: str
) -> tuple[Float[Tensor, "*tokens"], Bool[Tensor, "*tokens"]]:
    """Return the weights, and which ratios lie within the band."""
    inside = (ratios >= band[0]) & (ratios <= band[1])
    if outside == "mask":
        return torch.where(inside, ratios, 0.0), inside
    return ratios.clamp(*band), inside


def _metrics(
    old_log_probs: Float[Tensor, "B R"],
    rollout_log_probs: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    tokens: Float[Tensor, "B R"],
) -> dict[str, float]:
    log_ratio = torch.where(mask, old_log_probs - rollout_log_probs, 0.0).double()
    sequences = cut_log_ratio(log_ratio.sum(-1)).exp()
    count = mask.any(-1)

    numbers = {
        "rollout_corr/kl": -masked_mean(log_ratio, mask),
        "rollout_corr/k3_kl": masked_mean(tokens - 1 - log_ratio, mask),
        "rollout_corr/chi2_token": masked_mean(tokens**2, mask) - 1,
        "rollout_corr/chi2_seq": masked_sum(sequences**2, count) / count.sum() - 1,
    }
    return {name: value.item() for name, value in numbers.items()}
