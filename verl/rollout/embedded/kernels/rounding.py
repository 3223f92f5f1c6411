"""Round rows to eight bits (`verl.rollout.eight_bits`), each by one program in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.rollout.eight_bits import FP8, LARGEST, SMALLEST_ROW, Rows

_LARGEST = tl.constexpr(LARGEST[FP8])
_LARGEST_INTEGER = tl.constexpr(LARGEST[torch.int8])
_SMALLEST_ROW = tl.constexpr(SMALLEST_ROW)


def quantize_rows(x: Tensor, out: Rows) -> Rows:
    """Round the rows of x (M, K) to `out`."""
    x = x.contiguous()
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _quantize_rows[(rows,)](x, *out, width, BLOCK=block, num_warps=num_warps(block))
    return out


def num_warps(block: int) -> int:
    """Return the warps of a program that keeps a row of `block` numbers in its registers."""
    return min(32, max(1, block // 1024))


@triton.jit
def _quantize_rows(X, VALUES, SCALES, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    wide = tl.load(X + row * width + column, mask=inside, other=0.0).to(tl.float32)
    store_row(wide, VALUES + row * width + column, SCALES + row, inside)


@triton.jit
def store_row(wide, VALUES, SCALE, inside):
    """Store a row of fp32 numbers, zeros where it is not `inside`, as eight bits and their scale.

    A row with a NaN or an infinite number stays broken: its numbers or its scale are.
    """
    dtype = VALUES.dtype.element_ty
    scale, factor = row_scale(tl.max(tl.abs(wide), axis=0), tl.sum(wide * 0.0, axis=0), dtype)
    tl.store(SCALE, scale)
    tl.store(VALUES, rounded(wide * factor, dtype), mask=inside)


@triton.jit
def row_scale(largest, zero, dtype: tl.constexpr):
    """Return the scale of a row by its largest absolute number, and its reciprocal.

    Both are rounded to nearest: Triton's `/` is off by up to two units. The numbers of a row are
    multiplied by the reciprocal, since a division of each took half of a kernel's time.

    `zero` is NaN for a broken row. Integers have no NaN, so the scale becomes one.
    """
    largest = tl.maximum(largest, _SMALLEST_ROW)
    if dtype == tl.int8:
        return tl.div_rn(largest, _LARGEST_INTEGER) + zero, tl.div_rn(_LARGEST_INTEGER, largest)
    else:
        return tl.div_rn(largest, _LARGEST), tl.div_rn(_LARGEST, largest)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round numbers that are scaled to the largest of `dtype`."""
    if dtype == tl.int8:
        x = tl.floor(x + 0.5)
    return x.to(dtype)
