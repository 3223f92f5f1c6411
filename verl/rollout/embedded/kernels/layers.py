"""Compute the element-wise parts of a decoder layer, each in one pass over its tensors.

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


def rope_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    pages: Tensor,
    offsets: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    shift: float = 0.0,
) -> None:
    """Rotate queries and keys in place, and store keys and values in their pages.

    The rotation is equation 34 of Su et al. 2021, with the halves apart.

    Args:
        qkv: (b, (Hq + 2 Hk) D), with contiguous rows.
        cos: (positions, D).
        sin: likewise.
        positions: (b,) int64, which angles a row takes.
        pages: (b,) int64, the page of a row's key and value.
        offsets: (b,) int64, their place in the page.
        keys: (num_pages, Hk, page_size, D).
        values: likewise.
        key_scales: (num_pages, Hk, page_size), if keys and values are in eight bits.
        value_scales: likewise, with the same strides.
        query_norm: (D,), by which each query head is RMS-normed first (Qwen3).
        key_norm: likewise for key heads.
        eps: added to the mean of squares of these norms.
        shift: added to their weights.
    """
    scale_strides = (None, None)
    if key_scales is not None:
        assert value_scales is not None, "both or none have scales"
        assert key_scales.stride() == value_scales.stride(), "scales of one kind of page"
        scale_strides = key_scales.stride()[:2]
    heads_k = keys.shape[1]
    width = keys.shape[3]
    heads_q = qkv.shape[1] // width - 2 * heads_k

    _rope_store[(qkv.shape[0],)](
        qkv,
        qkv.stride(0),
        cos,
        sin,
        positions,
        pages,
        offsets,
        keys,
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values,
        values.stride(0),
        values.stride(1),
        values.stride(2),
        key_scales,
        value_scales,
        *scale_strides,
        query_norm,
        key_norm,
        eps,
        shift,
        HQ=heads_q,
        HK=heads_k,
        D=width,
        HALF=triton.next_power_of_2(width // 2),
        BLOCK_Q=triton.next_power_of_2(heads_q),
        BLOCK_K=triton.next_power_of_2(heads_k),
        num_warps=4,
    )


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
    wide = tl.load(FIRST + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if SECOND is not None:
        second = _part(
            SECOND, SECOND_ROWS, SECOND_COLUMNS, row, column, inside, width, SECOND_SPLITS, dtype
        )
        if INNER is not None:
            scale = tl.rsqrt(tl.sum(second * second, axis=0) / width + eps)
            factor = tl.load(INNER + column, mask=inside, other=0.0).to(tl.float32) + shift
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
    weight = tl.load(WEIGHT + column, mask=inside, other=0.0).to(tl.float32) + shift
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


@triton.jit
def _rope_store(
    QKV,
    qkv_row,
    COS,
    SIN,
    POSITIONS,
    PAGES,
    OFFSETS,
    KEYS,
    key_page,
    key_head,
    key_token,
    VALUES,
    value_page,
    value_head,
    value_token,
    KEY_SCALES,
    VALUE_SCALES,
    scale_page,
    scale_head,
    QUERY_NORM,
    KEY_NORM,
    eps,
    shift,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rotate and store one row."""
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(PAGES + row)
    offset = tl.load(OFFSETS + row)
    angle = tl.load(POSITIONS + row) * D + tl.arange(0, HALF)
    inside = tl.arange(0, HALF) < D // 2
    cos = tl.load(COS + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(SIN + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    source = QKV + row * qkv_row

    head, column, mask = _tile(BLOCK_Q, HQ, HALF, D)
    at = source + head * D + column
    low, high = _rotate(at, mask, cos, sin, QUERY_NORM, eps, shift, D)
    tl.store(at, low, mask=mask)
    tl.store(at + D // 2, high, mask=mask)

    head, column, mask = _tile(BLOCK_K, HK, HALF, D)
    at = source + (HQ + head) * D + column
    low, high = _rotate(at, mask, cos, sin, KEY_NORM, eps, shift, D)
    tl.store(at, low, mask=mask)
    tl.store(at + D // 2, high, mask=mask)
    target = KEYS + page * key_page + head * key_head + offset * key_token + column
    if KEY_SCALES is None:
        tl.store(target, low, mask=mask)
        tl.store(target + D // 2, high, mask=mask)
    else:
        place = page * scale_page + head * scale_head + offset
        _store_eight_bits(target, KEY_SCALES + place, low, high, mask, head < HK, D)

    at = source + (HQ + HK + head) * D + column
    target = VALUES + page * value_page + head * value_head + offset * value_token + column
    if VALUE_SCALES is None:
        tl.store(target, tl.load(at, mask=mask), mask=mask)
        tl.store(target + D // 2, tl.load(at + D // 2, mask=mask), mask=mask)
    else:
        place = page * scale_page + head * scale_head + offset
        low = tl.load(at, mask=mask, other=0.0)
        high = tl.load(at + D // 2, mask=mask, other=0.0)
        _store_eight_bits(target, VALUE_SCALES + place, low, high, mask, head < HK, D)


@triton.jit
def _store_eight_bits(TARGET, SCALES, low, high, mask, is_head, D: tl.constexpr):
    """Store heads, given as halves with zeros outside of the mask, and their SCALES (M, 1)."""
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    largest = tl.maximum(tl.max(magnitude(low), axis=1), tl.max(magnitude(high), axis=1))
    dtype = TARGET.dtype.element_ty
    scale, factor = row_scale(largest, dtype)
    tl.store(SCALES, scale[:, None], mask=is_head)
    tl.store(TARGET, rounded(low * factor[:, None], dtype), mask=mask)
    tl.store(TARGET + D // 2, rounded(high * factor[:, None], dtype), mask=mask)


@triton.jit
def _tile(BLOCK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr):
    """Return heads (BLOCK, 1), columns of their lower half (1, HALF), and which of them exist."""
    head = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, HALF)[None, :]
    return head, column, (head < HEADS) & (column < D // 2)


@triton.jit
def _rotate(AT, mask, cos, sin, NORM, eps, shift, D: tl.constexpr):
    """Load the two halves of heads at AT, norm them if there is a NORM, and rotate them."""
    low = tl.load(AT, mask=mask, other=0.0)
    high = tl.load(AT + D // 2, mask=mask, other=0.0)
    dtype = low.dtype
    low = low.to(tl.float32)
    high = high.to(tl.float32)

    if NORM is not None:
        mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / D
        scale = tl.rsqrt(mean + eps)[:, None]
        column = tl.arange(0, low.shape[1])
        inside = column < D // 2
        low_norm = tl.load(NORM + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        high_norm = tl.load(NORM + D // 2 + column, mask=inside, other=0.0)
        high_norm = high_norm.to(tl.float32)[None, :]
        low = (low * scale * (low_norm + shift)).to(dtype).to(tl.float32)
        high = (high * scale * (high_norm + shift)).to(dtype).to(tl.float32)

    return (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)
