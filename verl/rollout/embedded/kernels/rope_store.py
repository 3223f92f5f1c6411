"""Rotate queries and keys, and store keys and values in their pages, in one pass."""

import triton
import triton.language as tl
from torch import Tensor

from verl.rollout.embedded.kernels.rounding import magnitude, rounded, row_scale


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
    position = tl.load(POSITIONS + row)
    page = tl.load(PAGES + row)
    offset = tl.load(OFFSETS + row)

    # All loads come before the first store, behind which they would wait.
    head, column, is_query = _tile(BLOCK_Q, HQ, HALF, D)
    source = QKV + row * qkv_row
    query_at = source + head * D + column
    q_low, q_high = _halves(query_at, is_query, D)
    head, column, is_key = _tile(BLOCK_K, HK, HALF, D)
    key_at = source + (HQ + head) * D + column
    k_low, k_high = _halves(key_at, is_key, D)
    v_low, v_high = _halves(key_at + HK * D, is_key, D)

    angle = position * D + tl.arange(0, HALF)
    inside = tl.arange(0, HALF) < D // 2
    cos = tl.load(COS + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(SIN + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    q_low, q_high = _rotated(q_low, q_high, cos, sin, QUERY_NORM, eps, shift, D)
    k_low, k_high = _rotated(k_low, k_high, cos, sin, KEY_NORM, eps, shift, D)

    _store_halves(query_at, q_low, q_high, is_query, D)
    _store_halves(key_at, k_low, k_high, is_key, D)
    key_at = KEYS + page * key_page + head * key_head + offset * key_token + column
    value_at = VALUES + page * value_page + head * value_head + offset * value_token + column
    if KEY_SCALES is None:
        _store_halves(key_at, k_low, k_high, is_key, D)
        _store_halves(value_at, v_low, v_high, is_key, D)
    else:
        place = page * scale_page + head * scale_head + offset
        _store_eight_bits(key_at, KEY_SCALES + place, k_low, k_high, is_key, head < HK, D)
        _store_eight_bits(value_at, VALUE_SCALES + place, v_low, v_high, is_key, head < HK, D)


@triton.jit
def _halves(AT, mask, D: tl.constexpr):
    low = tl.load(AT, mask=mask, other=0.0)
    high = tl.load(AT + D // 2, mask=mask, other=0.0)
    return low, high


@triton.jit
def _store_halves(AT, low, high, mask, D: tl.constexpr):
    tl.store(AT, low, mask=mask)
    tl.store(AT + D // 2, high, mask=mask)


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
def _rotated(low, high, cos, sin, NORM, eps, shift, D: tl.constexpr):
    """Norm heads, given as halves, if there is a NORM, and rotate them."""
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
