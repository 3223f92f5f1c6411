"""Terms of the actor's loss that settings of a run choose, and the loss as the log gives it."""

from dataclasses import dataclass

from torch import Tensor

from verl.algorithms.advantages import formula_of
from verl.algorithms.divergences import DIVERGENCES
from verl.algorithms.kl import cut_log_ratio, kl_penalty
from verl.algorithms.padded import loss_settings
from verl.algorithms.policy_losses import PolicyLossInputs, PolicyLossOutput, policy_losses
from verl.algorithms.rollout_correction import (
    bounded_weights,
    loglinear_proximal,
    reinforce_of_rollout,
)
from verl.config import ActorConfig
from verl.workers.objective import Columns

AGGREGATION_FORMULAS = {
    "token-mean": "sum over all response tokens of the mini-batch / their number",
    "seq-mean-token-sum": "sum over a response's tokens, mean over the responses of the mini-batch",
    "seq-mean-token-mean": (
        "mean over a response's tokens, mean over the responses of the mini-batch"
    ),
    "seq-mean-token-sum-norm": (
        "sum over a response's tokens / data.max_response_length, mean over the responses of the "
        "mini-batch"
    ),
}


@dataclass(frozen=True, kw_only=True)
class DistillationTerm:
    """Term of the actor's loss for distillation: coef * divergence from the teacher."""

    kind: str  # of KL_KINDS, or of DIVERGENCES, which the model's pass computes
    coef: float
    is_whole_loss: bool  # without a policy loss

    @property
    def is_exact(self) -> bool:
        """Return whether the divergence is over the whole vocabulary."""
        return self.kind in DIVERGENCES

    def per_token(self, outputs: Columns, columns: Columns) -> Tensor:
        """Return the divergence of each token (M,)."""
        if self.is_exact:
            return outputs["teacher_divergence"]
        return kl_penalty(outputs["log_probs"], columns["teacher_log_prob"], self.kind)


@dataclass(frozen=True, kw_only=True)
class RolloutReinforce:
    """The policy loss that replaces the registered one, see `reinforce_of_rollout`."""

    weigh_by: str | None  # token, sequence, or None for weights of 1
    weight_band: tuple[float, float]
    outside: str  # truncate or mask

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        return reinforce_of_rollout(
            inputs, weigh_by=self.weigh_by, weight_band=self.weight_band, outside=self.outside
        )

    def describe(self) -> str:
        """Return the formula of a token, as the log gives it."""
        if self.weigh_by is None:
            return "reinforce: -A log pi"
        lower, upper = self.weight_band
        bounds = f"by {self.weigh_by}, within [{lower:g}, {upper:g}] ({self.outside})"
        return f"reinforce: -sg(w) A log pi, w = r {bounds}"


@dataclass(frozen=True, kw_only=True)
class LoglinearProximal:
    """Old log-probs of the decoupled objective without a pass, see `loglinear_proximal`.

    With `weighs`, tokens also weigh pi_old / mu, bounded by `weight_band` as in `correct_rollout`.
    """

    weighs: bool
    weight_band: tuple[float, float]
    outside: str  # truncate or mask

    def columns(self, log_probs: Tensor, columns: Columns) -> Columns:
        """Return `old_log_probs`, and `rollout_is_weights` if tokens are weighed."""
        rollout = columns["rollout_log_probs"]
        old = loglinear_proximal(log_probs, rollout, columns["token_age"])
        if not self.weighs:
            return {"old_log_probs": old}

        ratios = cut_log_ratio(old - rollout).exp()
        weights, _ = bounded_weights(ratios, self.weight_band, self.outside)
        if "rollout_is_weights" in columns:  # those of tokens beyond the bound on staleness
            weights = weights * columns["rollout_is_weights"]
        return {"old_log_probs": old, "rollout_is_weights": weights}


def describe_loss(
    config: ActorConfig,
    distillation: DistillationTerm | None = None,
    reinforce: RolloutReinforce | None = None,
) -> str:
    """Describe the actor's loss: the formula of a token, r = pi / pi_old, and the aggregation."""
    name = config.policy_loss.loss_mode
    loss = policy_losses.get(name)
    terms = [f"{name}: {formula_of(loss, 'a loss of your own', loss_settings(config))}"]
    if reinforce is not None:
        terms = [reinforce.describe()]
    if distillation is not None:
        divergence = f"{distillation.coef:g} {distillation.kind}(pi, teacher)"
        if distillation.is_whole_loss:
            terms = [divergence]
        else:
            terms.append(f"+ {divergence}")
    if config.entropy_coeff != 0:
        terms.append(f"- {config.entropy_coeff:g} entropy")
    if config.use_kl_loss:
        terms.append(f"+ {config.kl_loss_coef:g} KL(pi, reference) by {config.kl_loss_type}")
    for term in config.loss_extra:
        terms.append(f"+ {term.coef:g} {term.name}")

    mode = config.loss_agg_mode
    return f"{' '.join(terms)}. {mode}: {AGGREGATION_FORMULAS[mode]}."
