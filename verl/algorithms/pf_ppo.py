"""PF-PPO: draw the samples of a batch to learn from, Shen & Zhang 2024 (arXiv:2409.06957)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl.utils.errors import ConfigError

REWEIGHT_METHODS = ("pow", "max_min", "max_random")


def pf_ppo_weights(
    scores: Float[Tensor, " B"], method: str, weight_pow: float = 2.0
) -> Float[Tensor, " B"]:
    """Return how often each sample is drawn, up to a factor: extreme rewards are reliable.

    pow         |score|^weight_pow
    max_min     1 for the batch's highest and lowest score, 0 between
    max_random  0.4 for the highest score, 0.1 for all others

    Where all would be 0, all are 1.
    """
    if method == "pow":
        weights = scores.double().abs() ** weight_pow
    elif method == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).double()
    elif method == "max_random":
        weights = torch.where(scores == scores.max(), 0.4, 0.1).double()
    else:
        raise ConfigError(
            f"algorithm.pf_ppo.reweight_method must be one of {', '.join(REWEIGHT_METHODS)}, got "
            f"'{method}'."
        )
    return weights if weights.any() else torch.ones_like(weights)


def pf_ppo_rows(weights: Float[Tensor, " B"], seed: int) -> Int[Tensor, " B"]:
    """Draw B row numbers with replacement in proportion to the weights.

    They ascend, so that rows of a prompt stay together. A function of weights and seed.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(weights.cpu(), len(weights), replacement=True, generator=generator)
    return drawn.sort().values
