"""KL to a reference policy: estimators per token, reward penalty, coefficient controllers."""

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from verl.utils.errors import ConfigError

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: far beyond every clip range, and finite in every dtype
MAX_K3 = 10.0
KL_KINDS = (
    *("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"),
    *("kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"),
    "full",
)


def cut_log_ratio(log_ratio: Float[Tensor, "*tokens"]) -> Float[Tensor, "*tokens"]:
    """Cut logarithms of ratios at MAX_LOG_RATIO, so that the ratios are finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_penalty(
    log_probs: Float[Tensor, "*tokens"],
    ref_log_probs: Float[Tensor, "*tokens"],
    kind: str,
    *,
    exact: Float[Tensor, "*tokens"] | None = None,
) -> Float[Tensor, "*tokens"]:
    """Estimate KL(policy || reference) from tokens that the policy drew.

    After Schulman 2020 ("Approximating KL divergence"), with d = log pi(token) - log ref(token):

        kl, k1          d                unbiased, may be negative
        abs             |d|
        mse, k2         d^2 / 2          biased, low variance
        low_var_kl, k3  exp(-d) - 1 + d  unbiased, never negative; |d| cut at 20, the value at 10
        k1+, k3+, ...   value of the estimator before the +, gradient of k2 (straight-through)
        full            the sum over the vocabulary, which the caller gives as `exact`

    As a loss (differentiated through `log_probs`) k1 has an expected gradient of 0 on the policy's
    own tokens. The expected gradient of k2, and so of every form with +, is that of the KL. A token
    whose k3 is cut has no gradient.
    """
    if kind == "full":
        if exact is None:
            raise ConfigError(
                "KL estimator 'full' needs both policies' whole distribution at every token, and "
                "got the drawn tokens alone. Use low_var_kl (k3) here, which is unbiased as well; "
                "actor.kl_loss_type=full computes the exact KL in the loss."
            )
        return exact
    if kind in KL_KINDS and kind.endswith("+"):
        value = kl_penalty(log_probs.detach(), ref_log_probs, kind.removesuffix("+"))
        gradient = kl_penalty(log_probs, ref_log_probs, "k2")
        return value + (gradient - gradient.detach())

    difference = log_probs - ref_log_probs
    if kind in ("kl", "k1"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("mse", "k2"):
        return 0.5 * difference.square()
    if kind in ("low_var_kl", "k3"):
        difference = cut_log_ratio(difference)
        # expm1: near 0 the value is d^2 / 2, all of which exp(-d) - 1 would lose to rounding.
        return (torch.expm1(-difference) + difference).clamp(max=MAX_K3)
    raise ConfigError(f"KL estimator must be one of {', '.join(KL_KINDS)}, got '{kind}'.")


def apply_kl_penalty(
    scores: Float[Tensor, "B R"], kl: Float[Tensor, "B R"], mask: Shaped[Tensor, "B R"], coef: float
) -> Float[Tensor, "B R"]:
    """Subtract the KL penalty of each of the model's own tokens from its score.

    Eq. (2) of Ziegler et al. 2019 (arXiv:1909.08593):
    r_t = score_t - coef * kl_t where the mask is 1, and score_t elsewhere.
    """
    return scores - coef * torch.where(mask.bool(), kl, 0.0)


class FixedKLController:
    """A constant coefficient. A resumed run takes the one of its configuration."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Keep the coefficient."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Ignore the state, which is empty."""


class AdaptiveKLController:
    """Proportional control of the KL, section 2.2 of Ziegler et al. 2019 (arXiv:1909.08593).

        e = clip(KL / target - 1, -0.2, 0.2),    coef <- coef (1 + e n / horizon)

    after n samples, so that the coefficient can change by a fifth in `horizon` samples.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: int) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ConfigError(
                f"Adaptive KL needs target_kl and horizon above 0, got {target_kl} and {horizon}."
            )
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon
        self._has_moved = False

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move the coefficient after `n_steps` samples whose mean KL was `current_kl`."""
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon
        self._has_moved = True

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient, or nothing before it has moved."""
        return {"value": self.value} if self._has_moved else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Undo `state_dict`. The state of a fixed coefficient, which is empty, changes nothing."""
        if state:
            self.value = state["value"]
            self._has_moved = True


def get_kl_controller(kl_ctrl: Any) -> FixedKLController | AdaptiveKLController:
    """Build the controller of a section with `type`, `kl_coef`, `horizon` and `target_kl`."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise ConfigError(f"algorithm.kl_ctrl.type must be fixed or adaptive, got '{kl_ctrl.type}'.")
