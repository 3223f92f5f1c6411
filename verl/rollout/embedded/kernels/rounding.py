"""Round rows to eight bits (`verl.rollout.eight_bits`), each by one program in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.rollout.eight_bits import FP8, LARGEST, SMALLEST_ROW, Rows

_LARGEST = tl.constexpr(LARGEST[FP8])
_LARGEST_INTEGER = tl.constexpr(LARGEST[torch.int8])
_SMALLEST_ROW = tl.constexpr(SMALLEST_ROW)


def quantize_rows(x: Tensor, out: Rows, *, rotated: bool = False) -> Rows:
    """Round the rows of x (M, K), or of `rotate(x)`, to `out`."""
    x = x.contiguous()
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _quantize_rows[(rows,)](
        x, *out, width, ROTATED=rotated, BLOCK=block, num_warps=num_warps(block)
    )
    return out


def num_warps(block: int) -> int:
    """Return the warps of a program that keeps a row of `block` numbers in its registers."""
    return min(32, max(1, block // 1024))


@triton.jit
def _quantize_rows(X, VALUES, SCALES, width, ROTATED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    wide = tl.load(X + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if ROTATED:
        wide = rotate_eights(wide, BLOCK)
    store_row(wide, VALUES + row * width + column, SCALES + row, inside)


@triton.jit
def rotate_eights(x, BLOCK: tl.constexpr):
    """Multiply each eight adjacent numbers of x (BLOCK,) by a Hadamard matrix.

    A thread that has loaded them needs no other one.
    """
    cube = tl.reshape(x, (BLOCK // 8, 2, 2, 2))
    for _ in tl.static_range(3):
        # Add up along the last axis, which becomes the first of the three.
        first, second = tl.split(cube)
        cube = tl.permute(tl.join(first + second, first - second), (0, 3, 1, 2))
    return tl.reshape(cube, (BLOCK,))


@triton.jit
def store_row(wide, VALUES, SCALE, inside):
    """Store a row of fp32 numbers, zeros where it is not `inside`, as eight bits and their scale.

    A row with a NaN or an infinite number stays broken: its scale is infinite.
    """
    dtype = VALUES.dtype.element_ty
    scale, factor = row_scale(tl.max(magnitude(wide), axis=0), dtype)
    tl.store(SCALE, scale)
    tl.store(VALUES, rounded(wide * factor, dtype), mask=inside)


@triton.jit
def magnitude(x):
    """Return |x|, and infinity for NaN, which a maximum would pass over."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def row_scale(largest, dtype: tl.constexpr):
    """Return the scale of a row by its largest absolute number, and its reciprocal.

    Both are rounded to nearest: Triton's `/` is off by up to two units. The numbers of a row are
    multiplied by the reciprocal, since a division of each took half of a kernel's time.
    """
    largest = tl.maximum(largest, _SMALLEST_ROW)
    if dtype == tl.int8:
        return tl.div_rn(largest, _LARGEST_INTEGER), tl.div_rn(_LARGEST_INTEGER, largest)
    else:
        return tl.div_rn(largest, _LARGEST), tl.div_rn(_LARGEST, largest)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round numbers that are scaled to the largest of `dtype`."""
    if dtype == tl.int8:
        x = tl.floor(x + 0.5)
    return x.to(dtype)
