"""Attention masks for trying things out."""

import math

import torch
from torch import Tensor


def create_random_mask(
    input_ids: Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> Tensor:
    """A mask like `input_ids` (B, T): in each row padding, then tokens (at least one), then
    padding.

    Both numbers are drawn evenly: of tokens from `min_ratio_of_valid_token` to
    `max_ratio_of_valid_token` of T, of padding on the left from 0 to `max_ratio_of_left_padding` of
    T as far as the row has room for it.
    """
    rows, width = input_ids.shape
    slack = 1e-9 * width  # 0.29 * 100 is less than 29
    fewest = max(math.ceil(min_ratio_of_valid_token * width - slack), 1)
    most = math.floor(max_ratio_of_valid_token * width + slack)

    if not (
        min_ratio_of_valid_token >= 0
        and fewest <= most <= width
        and 0 <= max_ratio_of_left_padding <= 1
    ):
        raise ValueError(
            "Ratios lie between 0 and 1, and those of tokens must leave a number from 1 on: got "
            f"tokens from {min_ratio_of_valid_token} to {max_ratio_of_valid_token} and left "
            f"padding up to {max_ratio_of_left_padding} of {width} columns."
        )

    tokens = torch.randint(fewest, most + 1, (rows, 1))
    widest = (width - tokens).clamp(max=math.floor(max_ratio_of_left_padding * width + slack))
    left = (torch.rand(rows, 1, dtype=torch.float64) * (widest + 1)).long()
    column = torch.arange(width)

    return ((column >= left) & (column < left + tokens)).to(input_ids)
