"""Random attention masks, for tests and experiments."""

import math

import torch
from torch import Tensor


def create_random_mask(
    input_ids: Tensor,
    max_ratio_of_valid_token: float,
    max_ratio_of_left_padding: float,
    min_ratio_of_valid_token: float = 0,
) -> Tensor:
    """Draw a mask like `input_ids` (B, T): each row is padding, at least one token, padding.

    Both lengths are uniform: the tokens take `min_ratio_of_valid_token` to
    `max_ratio_of_valid_token` of T, and the left padding 0 to `max_ratio_of_left_padding` of T,
    limited by the remaining room. Raises ValueError for ratios that are out of range.
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
            "Ratios must lie between 0 and 1 and allow at least one token a row, got tokens from "
            f"{min_ratio_of_valid_token} to {max_ratio_of_valid_token} and left padding up to "
            f"{max_ratio_of_left_padding} of {width} columns."
        )

    tokens = torch.randint(fewest, most + 1, (rows, 1))
    widest = (width - tokens).clamp(max=math.floor(max_ratio_of_left_padding * width + slack))
    left = (torch.rand(rows, 1, dtype=torch.float64) * (widest + 1)).long()
    column = torch.arange(width)

    return ((column >= left) & (column < left + tokens)).to(input_ids)
