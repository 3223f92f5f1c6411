"""How attention of a decode step is launched: blocks, splits of rows, and their workspace."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from verl.rollout.embedded.kernels import PROCESSORS

# More splits fill the device at small batches, but their results must be merged.
_MAX_SPLITS = 32
_PROGRAMS_BY_PROCESSOR = 2
# Programs of eight bits are smaller. Five of them run at once on a multiprocessor, but four are
# faster unless they are less than three.
_PROGRAMS_OF_EIGHT_BITS = (3, 4, 5)
# Programs of four warps, and of two, that run at once on a multiprocessor with heads of 128.
_PROGRAMS_OF_FOUR_WARPS = 3
_PROGRAMS_OF_TWO_WARPS = 6
# From so many programs a multiprocessor on, two warps are faster if shared tokens are left out.
_PROGRAMS_OF_RESTS = 8


class DecodeConfig(NamedTuple):
    """`block_n` keys at a time (a power of two >= 16), `num_stages - 1` blocks being loaded."""

    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread; None: as many as the compiler takes

    @property
    def options(self) -> dict[str, int]:
        """Return what Triton takes."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.max_registers is not None:
            options["maxnreg"] = self.max_registers
        return options


def padded(count: int) -> int:
    """Round up to a power of two, at least the 16 that matrix units need."""
    return max(16, triton.next_power_of_2(count))


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
    lengths of the rows. With a single split, multiprocessors of one program wait for those of two,
    which costs `eight_bits` more than a merge: 80 rows of 3,900 tokens, two key heads of 128, took
    77 us on an H200, and 55 with three splits. Wide numbers took 83 us in any number of splits, and
    100 rows of 1,060 tokens 33 us in one and 40 in two.
    """
    programs = rows * kv_heads

    def splits_of(by_processor: int) -> int:
        return by_processor * num_sms // programs

    splits = splits_of(_PROGRAMS_BY_PROCESSOR)
    if widest <= 128 and eight_bits:
        fewest, usual, most = _PROGRAMS_OF_EIGHT_BITS
        splits = splits_of(usual)
        if splits * programs < fewest * num_sms:
            splits = splits_of(most)
    return max(1, min(_MAX_SPLITS, splits))


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
    programs: int | None = None,
    shares: bool = False,
) -> DecodeConfig:
    """Choose blocks and warps for a layer.

    Others give other bits, so they depend on the batch only if its number of `programs` is given.

    Programs of 64 keys and four warps read most ahead. With heads of 128 a multiprocessor has room
    for three of them, with 168 registers a thread (there are few spills, and 255 that the compiler
    would take leave room for two). 400 programs ran in two waves: 200 rows of 819 tokens took 53 us
    on an H200, and 47 in programs of 32 keys and two warps, of which six have room. With more than
    these, four warps are faster again, by 8 us of 78 for 450 rows of 578 tokens. Heads of 64 take
    less room, and two warps were faster at most sizes (350 rows of 651 tokens: 33 us, not 39).

    If the batch `shares` pages, these programs take the rest of each row, of which much time goes
    to the first loads. 1,024 rows with 16 tokens of their own, heads of 128, took 27 us in two
    warps and 38 in four.

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

    if widest > 128:
        return DecodeConfig(block_n=32, num_warps=4, num_stages=3)
    max_registers = 168 if widest > 64 else None
    if shares and programs is not None:
        if programs > _PROGRAMS_OF_RESTS * PROCESSORS:
            return DecodeConfig(32, 2, 3, max_registers)
        return DecodeConfig(64, 4, 3, max_registers)
    if programs is None or programs <= _PROGRAMS_OF_FOUR_WARPS * PROCESSORS:
        return DecodeConfig(64, 4, 3, max_registers)
    if widest > 64 and programs > _PROGRAMS_OF_TWO_WARPS * PROCESSORS:
        return DecodeConfig(64, 4, 3, max_registers)
    return DecodeConfig(32, 2, 3, max_registers)
