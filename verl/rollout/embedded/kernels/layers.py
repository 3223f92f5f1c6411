"""Compute norms and activations of a decoder layer, each in one pass over its tensors.

Sums and products are in fp32 and rounded once, when they are written, as by `torch.compile` in the
trainer's layers. Arguments choose any further rounding.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.rollout.eight_bits import Rows, Unscaled
from verl.rollout.embedded.kernels.rounding import (
    magnitude,
    num_warps,
    rotate_eights,
    rounded,
    row_scale,
    store_row,
)

# Values that one program of `swiglu` computes.
_BLOCK = 1024
# With so many rows or fewer, the programs of a norm all run at once.
_FEW_ROWS = 512


def add_rms_norm(
    parts: Sequence[Tensor | Unscaled],
    weight: Tensor,
    eps: float,
    *,
    writes_sum: bool,
    round_normed: bool = False,
    shift: float = 0.0,
    inner: Tensor | None = None,
    rows: Rows | None = None,
    rotated: bool = False,
    may_vary: bool = False,
) -> Tensor:
    """Norm a sum of tensors by RMSNorm (Zhang and Sennrich 2019, equation 4).

    Args:
        parts: one to three (b, H), contiguous. All but the first may also be (S, b, H), often in
            fp32: the rounded sum of these S is the part. Or they are products with separate scales.
        weight: (H,).
        eps: added to the mean of squares.
        writes_sum: write the sum to the first part, and norm the written numbers rather than the
            exact sum.
        round_normed: round the normed states before they are multiplied by the weight.
        shift: added to weights (Gemma has factors 1 + weight).
        inner: (H,), of another norm, which norms the last of two parts before they are added.
        rows: (b, H) in eight bits, for the result; its values are returned.
        rotated: rotate the result before it is rounded (`verl.rollout.eight_bits.rotate`).
        may_vary: let the last bits of a row depend on the number of rows. Few rows are then shared
            by more threads, which takes 1.2 us less at H = 1,536 on an H200.
    """
    first, *others = parts
    assert isinstance(first, Tensor), "the first part is a tensor"
    second, third = (_with_scales(part) for part in (*others, None, None)[:2])
    out, scales = (torch.empty_like(first), None) if rows is None else rows
    count, width = first.shape
    block = triton.next_power_of_2(width)
    by_warp = 256 if may_vary and rows is None and count <= _FEW_ROWS else 512

    _add_rms_norm[(count,)](
        first,
        *second,
        *third,
        weight,
        out,
        scales,
        width,
        eps,
        shift,
        inner,
        SECOND_SPLITS=_num_splits(second[0]),
        THIRD_SPLITS=_num_splits(third[0]),
        WRITES_SUM=writes_sum and bool(others),
        ROUND_NORMED=round_normed,
        ROTATED=rotated,
        BLOCK=block,
        num_warps=min(16, max(1, block // by_warp)),
    )

    return out


def _with_scales(part: Tensor | Unscaled | None) -> tuple[Tensor | None, ...]:
    """Return the values of a part, and the scales of its rows and columns if it has any."""
    return part if isinstance(part, Unscaled) else (part, None, None)


def _num_splits(part: Tensor | None) -> int:
    return 1 if part is None or part.ndim == 2 else len(part)


def swiglu(
    gate_up: Tensor, *, gelu: bool = False, rows: Rows | None = None, rotated: bool = False
) -> Tensor:
    """Compute silu(gate) * up (b, I) of `gate_up` (b, 2 I), the gates in front.

    Shazeer 2020, equation 6. `gelu`: with the tanh approximation of GELU for SiLU. `rows` (b, I) in
    eight bits is for the result; its values are returned. `rotated`: the result is rotated before
    it is rounded (`verl.rollout.eight_bits.rotate`).
    """
    count = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    if rows is not None:
        # One program computes a whole row, because the scale depends on all of it. One block would
        # be up to half empty.
        block = max(8, triton.next_power_of_2(width) // 2)
        rest = max(8, triton.next_power_of_2(max(1, width - block)))
        _swiglu_rows[(count,)](
            gate_up,
            *rows,
            width,
            GELU=gelu,
            ROTATED=rotated,
            BLOCK=block,
            REST=rest,
            num_warps=num_warps(block),
        )
        return rows.values

    out = gate_up.new_empty(count, width)
    _swiglu[(count, triton.cdiv(width, _BLOCK))](
        gate_up, out, width, GELU=gelu, BLOCK=_BLOCK, num_warps=4
    )
    return out


@triton.jit
def _add_rms_norm(
    FIRST,
    SECOND,
    SECOND_ROWS,
    SECOND_COLUMNS,
    THIRD,
    THIRD_ROWS,
    THIRD_COLUMNS,
    WEIGHT,
    OUT,
    SCALES,
    width,
    eps,
    shift,
    INNER,
    SECOND_SPLITS: tl.constexpr,
    THIRD_SPLITS: tl.constexpr,
    WRITES_SUM: tl.constexpr,
    ROUND_NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    dtype = FIRST.dtype.element_ty
    # Weights come first: behind a sum over warps, every row would wait for them once more.
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32) + shift
    wide = tl.load(FIRST + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if SECOND is not None:
        if INNER is not None:
            factor = tl.load(INNER + column, mask=inside, other=0.0).to(tl.float32) + shift
        second = _part(
            SECOND, SECOND_ROWS, SECOND_COLUMNS, row, column, inside, width, SECOND_SPLITS, dtype
        )
        if INNER is not None:
            scale = tl.rsqrt(tl.sum(second * second, axis=0) / width + eps)
            second = (second * scale * factor).to(dtype).to(tl.float32)
        wide += second
    if THIRD is not None:
        wide += _part(
            THIRD, THIRD_ROWS, THIRD_COLUMNS, row, column, inside, width, THIRD_SPLITS, dtype
        )

    if WRITES_SUM:
        tl.store(FIRST + row * width + column, wide.to(dtype), mask=inside)
        wide = wide.to(dtype).to(tl.float32)

    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    if ROUND_NORMED:
        normed = normed.to(dtype).to(tl.float32)
    if SCALES is None:
        tl.store(OUT + row * width + column, (normed * weight).to(dtype), mask=inside)
    else:
        normed *= weight
        if ROTATED:
            normed = rotate_eights(normed, BLOCK)
        store_row(normed, OUT + row * width + column, SCALES + row, inside)


@triton.jit
def _part(
    PART,
    ROWS,
    COLUMNS,
    row,
    column,
    inside,
    width,
    SPLITS: tl.constexpr,
    dtype: tl.constexpr,
):
    """Load one row of a part, in fp32, times its scales if there are any."""
    at = row * width + column
    total = tl.load(PART + at, mask=inside, other=0.0).to(tl.float32)
    for number in tl.static_range(1, SPLITS):
        part = tl.load(PART + number * tl.num_programs(0) * width + at, mask=inside, other=0.0)
        total += part.to(tl.float32)
    if ROWS is not None:
        total *= tl.load(ROWS + row) * tl.load(COLUMNS + column, mask=inside, other=0.0)
    return total.to(dtype).to(tl.float32)


@triton.jit
def _swiglu(GATE_UP, OUT, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    active = _active(GATE_UP + row * 2 * width + column, width, inside, GELU)
    tl.store(OUT + row * width + column, active.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_rows(
    GATE_UP,
    OUT,
    SCALES,
    width,
    GELU: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    GATE_UP += row * 2 * width
    OUT += row * width
    column = tl.arange(0, BLOCK)
    rest = BLOCK + tl.arange(0, REST)

    active = _active(GATE_UP + column, width, column < width, GELU)
    others = _active(GATE_UP + rest, width, rest < width, GELU)
    if ROTATED:
        active = rotate_eights(active, BLOCK)
        others = rotate_eights(others, REST)
    largest = tl.maximum(tl.max(magnitude(active), axis=0), tl.max(magnitude(others), axis=0))
    dtype = OUT.dtype.element_ty
    scale, factor = row_scale(largest, dtype)

    tl.store(SCALES + row, scale)
    tl.store(OUT + column, rounded(active * factor, dtype), mask=column < width)
    tl.store(OUT + rest, rounded(others * factor, dtype), mask=rest < width)


@triton.jit
def _active(GATE, width, inside, GELU: tl.constexpr):
    """Load gates and their factors, and compute `gated`; zeros outside."""
    gate = tl.load(GATE, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(GATE + width, mask=inside, other=0.0).to(tl.float32)
    return gated(gate, up, GELU)


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """Compute silu(gate) * up, or gelu(gate) * up, in fp32."""
    exponent = gate
    if GELU:
        # x / 2 * (1 + tanh(y)) = x / (1 + exp(-2 y)), y = sqrt(2 / pi) (x + 0.044715 x^3)
        exponent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-exponent)) * up
