"""Losses of the policy on packed tokens, their registry, and the registry of extra loss terms.

N packed response tokens, of one micro-batch or of many: a loss is a weighted sum over tokens, whose
weights have the denominators of the whole mini-batch (`masked.aggregation_weights`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from verl.algorithms.advantages import formula
from verl.algorithms.kl import cut_log_ratio
from verl.utils.errors import ConfigError
from verl.utils.registry import Registry


class PolicyLossInputs(NamedTuple):
    """The packed response tokens of one micro-batch. Prompts have no place here."""

    log_probs: Float[Tensor, " N"]  # of the current policy, with gradient
    old_log_probs: Float[Tensor, " N"]  # of the policy that the ratio is taken against
    advantages: Float[Tensor, " N"]
    weights: Float[Tensor, " N"]  # 0 on tokens that the model did not make
    sequence: Int[Tensor, " N"]  # which row a token belongs to
    # 1 where the model made the token; None: where the weight is not 0
    mask: Shaped[Tensor, " N"] | None = None
    # 1 where the loss's `selections` entry picked the token
    selected: Shaped[Tensor, " N"] | None = None

    @property
    def own(self) -> Bool[Tensor, " N"]:
        """Mark the tokens that the model made. Finite values on others change nothing."""
        return (self.weights != 0) if self.mask is None else self.mask.bool()

    def log_ratio(self) -> Float[Tensor, " N"]:
        """Compute log(pi / pi_old), cut at MAX_LOG_RATIO, and 0 on tokens not made by the model."""
        return cut_log_ratio(torch.where(self.own, self.log_probs - self.old_log_probs, 0.0))

    def sequence_mean(self, values: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Average `values` over the model's tokens of each token's sequence, in float64.

        A sequence lies in one micro-batch as a whole. The host does not wait for the device.
        """
        totals, counts, slot = self._sequence_totals(values)
        return (totals / counts)[slot]

    def sequence_sum(self, values: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Add `values` up as `sequence_mean` averages them."""
        totals, _, slot = self._sequence_totals(values)
        return totals[slot]

    def _sequence_totals(self, values: Float[Tensor, " N"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return sum and count of the model's tokens for each sequence, and each token's sequence
        among these."""
        order = self.sequence.argsort(stable=True)
        ranked = self.sequence[order]
        changes = (ranked[1:] != ranked[:-1]).long()
        starts = torch.nn.functional.pad(changes, (1, 0))[: len(ranked)]
        slot = torch.empty_like(order).scatter(0, order, starts.cumsum(0))
        zero = torch.zeros_like(values, dtype=torch.float64)
        own = self.own
        totals = zero.index_add(0, slot, torch.where(own, values, 0.0).double())
        counts = zero.detach().index_add(0, slot, own.double()).clamp(min=1)
        return totals, counts, slot


class PolicyLossOutput(NamedTuple):
    """The answer of a policy loss.

    Each entry of `means` becomes a metric: `actor/<name>`, or the name itself if it has a slash.
    """

    loss: Float[Tensor, ""]
    # averaged over the response tokens of the mini-batch; a scalar counts for each token
    means: dict[str, Float[Tensor, " N"] | Float[Tensor, ""]]


class SelectionInputs(NamedTuple):
    """All response tokens of a mini-batch, those of all ranks."""

    log_probs: Float[Tensor, " M"]  # of the policy before this update
    old_log_probs: Float[Tensor, " M"]
    advantages: Float[Tensor, " M"]
    # uniform in [0, 1): a function of step, prompt, response and position
    noise: Float[Tensor, " M"]


# name -> loss(PolicyLossInputs, **settings) -> PolicyLossOutput. The settings are clip_ratio_low,
# clip_ratio_high, clip_ratio_c, loss_agg_mode and every key of actor.policy_loss; a loss names
# those that it reads and takes the others as `**_`.
policy_losses: Registry[Callable[..., PolicyLossOutput]] = Registry(
    "policy loss (actor.policy_loss.loss_mode)"
)

# name of a loss that depends on its whole mini-batch -> selection(SelectionInputs, **settings) ->
# (M,) bool. The log-probs of the mini-batch are computed first, and the selected tokens reach the
# loss as `selected`.
selections: Registry[Callable[..., Tensor]] = Registry("selection of tokens for a policy loss")

# name -> term(PolicyLossInputs, the micro-batch's other packed columns) -> scalar, added times its
# coefficient. To be independent of micro-batching it is a sum over tokens times `weights`, as the
# policy loss is.
ExtraLoss = Callable[[PolicyLossInputs, Mapping[str, Tensor]], Tensor]
extra_losses: Registry[ExtraLoss] = Registry("extra loss term")


def means_of(
    inputs: PolicyLossInputs, clipped: Tensor | None = None, clipped_lower: Tensor | None = None
) -> dict[str, Float[Tensor, " N"]]:
    """Return the metrics of every loss: clipped tokens, and the k1 estimate of KL(old || new)."""
    nothing = torch.zeros_like(inputs.log_probs, requires_grad=False)
    dtype = nothing.dtype
    return {
        "pg_clipfrac": nothing if clipped is None else clipped.to(dtype),
        "pg_clipfrac_lower": nothing if clipped_lower is None else clipped_lower.to(dtype),
        "ppo_kl": -inputs.log_ratio().detach(),
    }


def weighted(losses: Float[Tensor, " N"], inputs: PolicyLossInputs) -> Float[Tensor, ""]:
    """Sum the losses times `weights`, over the tokens that the model made."""
    weighted = torch.where(inputs.own, losses, 0.0) * inputs.weights
    return weighted.sum().to(inputs.log_probs.dtype)


def output_of(
    inputs: PolicyLossInputs,
    losses: Float[Tensor, " N"],
    clipped: Tensor | None = None,
    clipped_lower: Tensor | None = None,
) -> PolicyLossOutput:
    """Return the `weighted` losses of tokens, and the metrics `means_of` every loss."""
    return PolicyLossOutput(weighted(losses, inputs), means_of(inputs, clipped, clipped_lower))


def clipped_surrogate(
    ratio: Float[Tensor, " N"],
    advantages: Float[Tensor, " N"],
    low: float,
    high: float,
) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
    """Return the losses max(-A r, -A clip(r, 1 - low, 1 + high)), and where the clip counts."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    is_clipped = clipped > unclipped
    return torch.maximum(unclipped, clipped), is_clipped


@policy_losses.register("vanilla")
@formula(
    "max(-r A, -A clip(r, 1 - {clip_ratio_low}, 1 + {clip_ratio_high})), at most -{clip_ratio_c} A "
    "where A < 0"
)
def vanilla(
    inputs: PolicyLossInputs,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
    **_: Any,
) -> PolicyLossOutput:
    """Clip the ratio as PPO does, eq. (7) of Schulman et al. 2017 (arXiv:1707.06347).

    With the dual clip of eq. (5) of Ye et al. 2020 (arXiv:1912.09729), and the ratio r = pi /
    pi_old of a token:

        L_clip = max(-A r, -A clip(r, 1 - low, 1 + high))
        L = min(L_clip, -A c)  where A < 0,  else L_clip

    low = high is PPO's epsilon; high > low is the clip-higher of DAPO (Yu et al. 2025,
    arXiv:2503.14476).
    """
    if clip_ratio_c <= 1.0:
        raise ConfigError(
            f"clip_ratio_c must be greater than 1, got {clip_ratio_c}. The paper takes 3."
        )

    ratio = inputs.log_ratio().exp()
    advantages = inputs.advantages
    bounded, is_clipped = clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)
    ceiling = -advantages * clip_ratio_c
    negative = advantages < 0
    losses = torch.where(negative, torch.minimum(bounded, ceiling), bounded)
    return output_of(inputs, losses, is_clipped, negative & (bounded > ceiling))


@policy_losses.register("gpg")
@formula("-A log pi")
def gpg(inputs: PolicyLossInputs, **_: Any) -> PolicyLossOutput:
    """Compute the plain policy gradient: L = -A log pi, without ratio or clip.

    Chu et al. 2025 (arXiv:2504.02546).
    """
    return output_of(inputs, -inputs.advantages * inputs.log_probs)


@policy_losses.register("cispo")
@formula("-sg(clip(r, 1 - {clip_ratio_low}, 1 + {clip_ratio_high})) A log pi")
def cispo(
    inputs: PolicyLossInputs, *, clip_ratio_low: float, clip_ratio_high: float, **_: Any
) -> PolicyLossOutput:
    """Clip the weights, so that no token loses its gradient: CISPO.

    Eqs. (4) and (5) of MiniMax 2025 (arXiv:2506.13585):

        L = -sg(clip(r, 1 - low, 1 + high)) A log pi        (sg: no gradient through it)

    The paper has no lower bound (low = 1 or more) and tunes the upper one.
    """
    ratio = inputs.log_ratio().exp().detach()
    clipped = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    losses = -clipped * inputs.advantages * inputs.log_probs
    return output_of(inputs, losses, clipped != ratio)


@policy_losses.register("sapo")
@formula("-4 / tau sigmoid(tau (r - 1)) A, tau = {tau_pos} where A > 0, else {tau_neg}")
def sapo(inputs: PolicyLossInputs, *, tau_pos: float, tau_neg: float, **_: Any) -> PolicyLossOutput:
    """Soft adaptive policy optimization, Gao et al. 2025 (arXiv:2511.20347).

        L = -f(r) A, f(r) = 4 / tau * sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg

    A smooth gate instead of the clip: the gradient is that of r A at r = 1 and fades on both sides
    of it.
    """
    ratio = inputs.log_ratio().exp()
    tau = torch.where(inputs.advantages > 0, tau_pos, tau_neg)
    losses = -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * inputs.advantages
    return output_of(inputs, losses)


@policy_losses.register("dppo")
@formula(
    "-M r A, M = 0 where the step leads away from pi_old and the {dppo_divergence} distance > "
    "{dppo_threshold}"
)
def dppo(
    inputs: PolicyLossInputs, *, dppo_divergence: str, dppo_threshold: float, **_: Any
) -> PolicyLossOutput:
    """Divergence PPO with the binary approximation, Qi et al. 2026 (arXiv:2602.04879).

        L = -M r A,    M = 0 where (A > 0 and r > 1 or A < 0 and r < 1) and D > threshold,  else 1
        tv  D = |pi_old - pi|
        kl  D = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))

    of the drawn token against all others together: a rare token may change its ratio freely, and a
    likely one not. The paper takes 0.15 for tv or 0.05 for kl, and as pi_old the policy that drew
    the tokens (`algorithm.rollout_correction.bypass_mode`).
    """
    log_ratio = inputs.log_ratio()
    ratio = log_ratio.exp()
    old = torch.where(inputs.own, inputs.old_log_probs, 0.0).exp()
    new = torch.where(inputs.own, inputs.log_probs.detach(), 0.0).exp()

    if dppo_divergence == "tv":
        divergence = (old - new).abs()
    elif dppo_divergence == "kl":
        tiny = torch.finfo(old.dtype).tiny
        rest_old = (1 - old).clamp(min=0)
        rest_new = (1 - new).clamp(min=tiny)
        divergence = -old * log_ratio.detach() + torch.xlogy(rest_old, rest_old / rest_new)
    else:
        raise ConfigError(f"policy_loss.dppo_divergence must be tv or kl, got '{dppo_divergence}'.")

    leads_away = torch.where(inputs.advantages > 0, ratio > 1, ratio < 1)
    cut = leads_away & (divergence > dppo_threshold) & (inputs.advantages != 0)
    losses = torch.where(cut, 0.0, -ratio * inputs.advantages)
    return output_of(inputs, losses, cut)


@policy_losses.register("dppo_tv")
@formula("dppo with the total variation, threshold {dppo_threshold}")
def dppo_tv(inputs: PolicyLossInputs, *, dppo_threshold: float, **_: Any) -> PolicyLossOutput:
    """Divergence PPO by total variation, see `dppo`."""
    return dppo(inputs, dppo_divergence="tv", dppo_threshold=dppo_threshold)


@policy_losses.register("dppo_kl")
@formula("dppo with the binary KL, threshold {dppo_kl_threshold}")
def dppo_kl(inputs: PolicyLossInputs, *, dppo_kl_threshold: float, **_: Any) -> PolicyLossOutput:
    """Divergence PPO by the binary KL, see `dppo`."""
    return dppo(inputs, dppo_divergence="kl", dppo_threshold=dppo_kl_threshold)


@policy_losses.register("dro")
@formula("-A log pi + {dro_beta} / 2 (log r)^2")
def dro(inputs: PolicyLossInputs, *, dro_beta: float, **_: Any) -> PolicyLossOutput:
    """Direct reward optimization by tokens, after Richemond et al. 2024 (arXiv:2405.19107).

        L = -A log pi + beta / 2 (log pi - log pi_old)^2

    But for a constant this is 1 / (2 beta) (A - beta log r)^2, the paper's squared error with the
    advantage in place of reward less value. The penalty holds also where A = 0.
    """
    penalty = 0.5 * dro_beta * inputs.log_ratio().square()
    losses = -inputs.advantages * inputs.log_probs + penalty
    return output_of(inputs, losses)
