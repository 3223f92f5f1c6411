"""Round rows to eight bits (`verl.rollout.fp8`), each by one program in one pass."""

import triton
import triton.language as tl
from torch import Tensor

from verl.rollout.fp8 import LARGEST, SMALLEST_ROW, Rows

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST_ROW = tl.constexpr(SMALLEST_ROW)


def quantize_rows(x: Tensor, out: Rows | None = None) -> Rows:
    """Round the rows of x (M, K) to eight bits."""
    x = x.contiguous()
    rows, width = x.shape
    if out is None:
        out = Rows.empty(x.shape, x.device)
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

    A NaN stays one. In a row with an infinite number, all numbers become NaN or infinite.
    """
    scale, factor = row_scale(tl.max(tl.abs(wide), axis=0))
    tl.store(SCALE, scale)
    tl.store(VALUES, (wide * factor).to(VALUES.dtype.element_ty), mask=inside)


@triton.jit
def row_scale(largest):
    """Return the scale of a row by its largest absolute number, and its reciprocal.

    Both are rounded to nearest: Triton's `/` is off by up to two units. The numbers of a row are
    multiplied by the reciprocal, since a division of each took half of a kernel's time.
    """
    largest = tl.maximum(largest, _SMALLEST_ROW)
    return tl.div_rn(largest, _LARGEST), tl.div_rn(_LARGEST, largest)
