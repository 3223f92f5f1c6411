"""Sums and means over real tokens alone, and the weights that turn token losses into one number.

A mask is 1 (or True) where a token counts. Values elsewhere are never used: they may be NaN.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from verl.utils.errors import ConfigError

AGGREGATION_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def masked_sum(
    values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Sum the values under the mask, over all of them or along `dim`."""
    return torch.where(mask.bool(), values, 0.0).sum(dim)


def masked_mean(
    values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"], dim: int | None = None
) -> Float[Tensor, "..."]:
    """Average the values under the mask; 0 where the mask is empty."""
    return masked_sum(values, mask, dim) / mask.bool().sum(dim).clamp(min=1)


def masked_var(
    values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"], unbiased: bool = True
) -> Float[Tensor, ""]:
    """Compute the variance of the values under the mask; 0 for fewer than two values.

    The denominator is n - 1 if unbiased.
    """
    count = mask.bool().sum()
    squares = masked_sum((values - masked_mean(values, mask)) ** 2, mask)
    return squares / (count - int(unbiased)).clamp(min=1)


def masked_whiten(
    values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"], shift_mean: bool = True
) -> Float[Tensor, "*shape"]:
    """Scale values to mean 0 and variance 1 under the mask; 0 elsewhere.

    `shift_mean=False` keeps the mean.
    """
    mean = masked_mean(values, mask)
    var = masked_var(values, mask)
    shift = 0.0 if shift_mean else mean
    whitened = (values - mean) * torch.rsqrt(var + 1e-8) + shift
    return torch.where(mask.bool(), whitened, 0.0)


def aggregation_weights(
    response_mask: Shaped[Tensor, "B R"], mode: str, *, num_sequences: int | None = None
) -> Float[Tensor, "B R"]:
    """Compute fp32 weights that make the mini-batch's loss `(loss * weights).sum()`.

    Parts of the mini-batch then simply add up. With n sequences, l_i response tokens in row i and
    the mask m:

        token-mean               m_it / sum_i l_i   every token counts the same (DAPO)
        seq-mean-token-sum       m_it / n           long responses count more
        seq-mean-token-mean      m_it / (n l_i)     every response counts the same (GRPO)
        seq-mean-token-sum-norm  m_it / (n R)       a constant for l_i: no length bias (Dr.GRPO)

    n is the number of rows with at least one response token: rows of padding alone change nothing.
    Where this mask is one part of a mini-batch, give n of the whole as `num_sequences` (token-mean
    needs the whole mask). R is the padded response length, so it must be the configured constant
    and not the longest response of the batch.
    """
    return _weights(response_mask, mode, num_sequences).float()


def agg_loss(
    loss_mat: Float[Tensor, "B R"], loss_mask: Shaped[Tensor, "B R"], loss_agg_mode: str
) -> Float[Tensor, ""]:
    """Reduce token losses by `aggregation_weights`; values off the mask may be NaN."""
    weights = _weights(loss_mask, loss_agg_mode, None).to(loss_mat.dtype)
    return (torch.where(loss_mask.bool(), loss_mat, 0.0) * weights).sum()


def _weights(response_mask: Tensor, mode: str, num_sequences: int | None) -> Tensor:
    """Compute weights in float64: fp32 counts tokens exactly only up to 2^24."""
    mask = response_mask.bool().double()
    lengths = mask.sum(-1, keepdim=True)
    if num_sequences is None:
        sequences = (lengths > 0).sum().clamp(min=1)
    else:
        sequences = max(num_sequences, 1)

    if mode == "token-mean":
        return mask / lengths.sum().clamp(min=1)
    if mode == "seq-mean-token-sum":
        return mask / sequences
    if mode == "seq-mean-token-mean":
        return mask / lengths.clamp(min=1) / sequences
    if mode == "seq-mean-token-sum-norm":
        return mask / max(mask.shape[-1], 1) / sequences
    raise ConfigError(f"loss_agg_mode must be one of {', '.join(AGGREGATION_MODES)}, got '{mode}'.")
