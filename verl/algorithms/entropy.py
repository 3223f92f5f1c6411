"""Controllers of the entropy bonus's coefficient."""

from verl.utils.errors import ConfigError


class FixedEntropyController:
    """A constant coefficient. A resumed run takes the one of its configuration."""

    def __init__(self, coef: float) -> None:
        self.value = coef

    def update(self, entropy: float) -> None:
        """Keep the coefficient."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Ignore the state, which is empty."""


class AdaptiveEntropyController:
    """Adaptive entropy control, He et al. 2025 (Skywork-OR1, arXiv:2505.22312).

    c <- c + delta  where the entropy is below the target,  c - delta (at least 0) where it is above
    coefficient = c  where the entropy is at most the target,  else 0
    """

    def __init__(self, coef: float, *, target_entropy: float, delta: float) -> None:
        if target_entropy < 0 or delta <= 0:
            raise ConfigError(
                "Adaptive entropy needs target_entropy of at least 0 and delta above 0, got "
                f"{target_entropy} and {delta}."
            )
        self.coef = self.value = coef
        self.target = target_entropy
        self.delta = delta
        self._has_moved = False

    def update(self, entropy: float) -> None:
        """Set the coefficient of the next step.

        Args:
            entropy: mean entropy of the last step, in nats a token.
        """
        if entropy < self.target:
            self.coef += self.delta
        elif entropy > self.target:
            self.coef = max(self.coef - self.delta, 0.0)
        self.value = self.coef if entropy <= self.target else 0.0
        self._has_moved = True

    def state_dict(self) -> dict[str, float]:
        """Return the coefficients, or nothing before they have moved."""
        return {"coef": self.coef, "value": self.value} if self._has_moved else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Undo `state_dict`. The state of a fixed coefficient, which is empty, changes nothing."""
        if state:
            self.coef = state["coef"]
            self.value = state["value"]
            self._has_moved = True
