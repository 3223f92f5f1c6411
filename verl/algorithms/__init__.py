"""Advantages from rewards, losses from log-probs: pure functions of tensors, a file per family.

Importing the package fills the registries: advantage estimators, policy losses, extra loss terms.
"""

from verl.algorithms import (
    advantages,
    covariance_losses,
    group_advantages,
    kl,
    masked,
    mismatch,
    policy_losses,
    reinforce,
    sequence_losses,
    turn_advantages,
    value_losses,
)

__all__ = [
    "advantages",
    "covariance_losses",
    "group_advantages",
    "kl",
    "masked",
    "mismatch",
    "policy_losses",
    "reinforce",
    "sequence_losses",
    "turn_advantages",
    "value_losses",
]
