"""Advantages from the rewards of several responses to one prompt, without a critic."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl.algorithms.advantages import AdvantageInputs, advantage_estimators
from verl.utils.errors import ConfigError


def group_ids(uids: Sequence[str] | np.ndarray) -> Int[Tensor, " B"]:
    """Prompt identifiers of any kind to group numbers 0, 1, ..."""
    numbers: dict[object, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=torch.int64)


def group_mean_and_std(
    scores: Float[Tensor, " B"], group: Int[Tensor, " B"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Mean and unbiased standard deviation of each row's group, in float64. A group of one has mean 0 and std 1."""
    # float64: with equal rewards the mean is off by one rounding, which divided by epsilon would be an advantage.
    scores = scores.double()
    _, slot = torch.unique(group, return_inverse=True)
    count = torch.zeros_like(scores).index_add(0, slot, torch.ones_like(scores))[slot]
    mean = torch.zeros_like(scores).index_add(0, slot, scores)[slot] / count
    squares = torch.zeros_like(scores).index_add(0, slot, (scores - mean) ** 2)[slot]
    alone = count == 1
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return torch.where(alone, 0.0, mean), torch.where(alone, 1.0, std)


def grpo_advantages(
    scores: Float[Tensor, " B"], group: Int[Tensor, " B"], *, norm_by_std: bool = True, epsilon: float = 1e-6
) -> Float[Tensor, " B"]:
    """(r_i - mean of the group) / (std of the group + epsilon); without the division if not `norm_by_std`."""
    mean, std = group_mean_and_std(scores, group)
    advantages = scores.double() - mean
    return (advantages / (std + epsilon) if norm_by_std else advantages).to(scores.dtype)


@advantage_estimators.register("grpo")
def grpo(inputs: AdvantageInputs) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """Group-relative advantages, section 4.1.2 of Shao et al. 2024 (arXiv:2402.03300).

        A_it = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + 1e-6),    r_i = sum over t of the row's rewards

    for every token of response i. std is the unbiased one (G - 1). `norm_by_std=False` leaves the division out: Dr.GRPO
    (Liu et al. 2025, arXiv:2503.20783). The papers do not define a group of one; its mean counts as 0 and its std as 1,
    as in verl 0.5, so its advantage is the plain reward. Every row counts in its group, also one without tokens.
    Returns equal the advantages.
    """
    if inputs.group is None:
        raise ConfigError("adv_estimator=grpo needs a group number (which prompt) for every row, got none.")
    scores = inputs.token_level_rewards.sum(-1)
    advantages = grpo_advantages(scores, inputs.group, norm_by_std=inputs.norm_by_std)
    tokens = torch.where(inputs.response_mask.bool(), advantages[:, None], 0.0)
    return tokens, tokens.clone()
