"""How attention of a decode step is launched: blocks, splits of rows, and their workspace."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from verl.rollout.embedded.kernels import PROCESSORS

# More splits fill the device at small batches, but their results must be merged. Many splits pay up
# to two programs on each multiprocessor, a few of them up to four.
_MAX_SPLITS = 32
_PROGRAMS_OF_MANY = 2
_FEW_SPLITS = 4
_PROGRAMS_OF_FEW = 4
# Programs of eight bits are smaller. Five of them run at once on a multiprocessor, but four are
# faster unless they are less than three.
_PROGRAMS_OF_EIGHT_BITS = (3, 4, 5)
# Programs that run at once in three stages: three on each multiprocessor of an H100 or H200.
_THREE_STAGES = 3 * PROCESSORS


class DecodeConfig(NamedTuple):
    """`block_n` keys at a time (a power of two >= 16), `num_stages - 1` blocks being loaded."""

    block_n: int
    num_warps: int
    num_stages: int


class SplitWorkspace(NamedTuple):
    """fp32 memory for n partial results: outputs (n, Dv) and log2 of the softmax denominators (n,).

    `arrived` int32, a number or more for each key head of a row, counts the splits that have ended;
    it is 0 before and after every call.
    """

    out: Tensor
    lse: Tensor
    arrived: Tensor


def split_workspace(
    rows: int, heads: int, value_dim: int, num_splits: int, device: torch.device | str
) -> SplitWorkspace:
    """Allocate memory for `num_splits` partial results of each of rows x heads queries.

    A workspace for the widest layer serves all layers in turn, and every batch without more rows x
    splits.
    """
    count = rows * heads * num_splits
    return SplitWorkspace(
        torch.empty(count, value_dim, dtype=torch.float32, device=device),
        torch.empty(count, dtype=torch.float32, device=device),
        torch.zeros(rows * heads, dtype=torch.int32, device=device),
    )


def choose_num_splits(
    rows: int, kv_heads: int, num_sms: int, *, widest: int, eight_bits: bool = False
) -> int:
    """Return the number of splits of a row's keys that gives all multiprocessors a few.

    It depends on the batch and on the `widest` head alone, because only the device knows the
    lengths of the rows. With a single split, multiprocessors of one program wait for those of two:
    80 rows of 3,900 tokens, two key heads of 128, took 108 us on an H200, and 83 with three splits.
    Keys and values in `eight_bits` took 77 and 55 us; a rollout to 8,192 tokens took 25.5 s with
    the splits of wide numbers, and 24.6 as here.
    """
    programs = rows * kv_heads

    def splits_of(by_processor: int) -> int:
        return by_processor * num_sms // programs

    if widest <= 128 and eight_bits:
        fewest, usual, most = _PROGRAMS_OF_EIGHT_BITS
        splits = splits_of(usual)
        if splits * programs < fewest * num_sms:
            splits = splits_of(most)
        return max(1, min(_MAX_SPLITS, splits))

    splits = min(_MAX_SPLITS, splits_of(_PROGRAMS_OF_MANY))
    if widest <= 128:
        splits = max(splits, min(_FEW_SPLITS, splits_of(_PROGRAMS_OF_FEW)))
    return max(1, splits)


def fixed_num_splits(
    table_width: int, page_size: int, split_tokens: int, window: int | None = None
) -> int:
    """Return the number of splits of `split_tokens` tokens in a row of `table_width` pages."""
    splits = triton.cdiv(table_width * page_size, split_tokens)
    # At worst only the first key of a window stands in the first of its splits.
    if window is None:
        return splits
    within_window = triton.cdiv(window - 1, split_tokens) + 1
    return min(splits, within_window)


def decode_config(
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    eight_bits: bool = False,
    programs: int,
    takes_fresh: bool,
) -> DecodeConfig:
    """Choose blocks and warps for a layer.

    They never depend on the batch, since others give other bits. Stages do not change the bits.

    Three stages load more keys of the longest rows ahead, which a step waits for (64 rows of 256 to
    1,280 tokens, heads of 128, on an H200: 25 us instead of 27, and 39 instead of 46 at 7B). But a
    multiprocessor then has room for three programs, not four: 512 `programs` of rows of 750 tokens
    ran in two waves, and took 70 us instead of 55. Programs without a fresh token are slower by two
    stages up to two waves of three (640: 72 us instead of 67), and with more faster where rows are
    as long as one another (1,024: 76 us instead of 85).

    Keys and values in `eight_bits` take as many registers again for their conversion. With two
    warps a program, five programs fit on a multiprocessor, and reductions join two warps instead of
    four. FP8, 1,024 rows of 256 to 1,280 tokens, heads of 128, on an H200: 158 us instead of 195;
    int8 with 300 tokens each: 58 us, and 67 with 128 keys and four warps.
    """
    if dtype == torch.float32:
        return DecodeConfig(block_n=32, num_warps=8, num_stages=2)

    widest = max(dim, value_dim)
    if eight_bits:
        if widest > 128:
            return DecodeConfig(block_n=64, num_warps=4, num_stages=3)
        return DecodeConfig(block_n=64, num_warps=2, num_stages=3)

    waves = 1 if takes_fresh else 2
    crowded = 64 < widest <= 128 and programs > waves * _THREE_STAGES
    block_n = 64 if widest <= 128 else 32
    return DecodeConfig(block_n=block_n, num_warps=4, num_stages=2 if crowded else 3)
