"""Rotate the newest heads of a row within attention, and round them to eight bits."""

import triton
import triton.language as tl

from verl.rollout.embedded.kernels.rounding import store_row


@triton.jit
def load_with_partners(AT, dims, mask, DIM: tl.constexpr):
    """Load heads (M, BLOCK_DIM) at AT, and for each number its partner of the rotation.

    A product needs heads in one piece, not in halves.
    """
    one = tl.load(AT + dims, mask=mask, other=0.0)
    other = tl.load(AT + _partner(dims, DIM), mask=mask, other=0.0)
    return one, other


@triton.jit
def turned(one, other, dims, mask, COS, SIN, position, NORM, eps, shift, DIM: tl.constexpr):
    """Norm heads of `load_with_partners`, if there is a NORM, and rotate them."""
    dtype = one.dtype
    one = one.to(tl.float32)
    other = other.to(tl.float32)

    if NORM is not None:
        scale = tl.rsqrt(tl.sum(one * one, 1) / DIM + eps)[:, None]
        factor = tl.load(NORM + dims, mask=dims < DIM, other=0.0).to(tl.float32) + shift
        one *= scale * factor
        factor = tl.load(NORM + _partner(dims, DIM), mask=dims < DIM, other=0.0)
        other *= scale * (factor.to(tl.float32) + shift)
        one = one.to(dtype).to(tl.float32)
        other = other.to(dtype).to(tl.float32)

    # Every head loads them for itself, so that threads keep the numbers of their heads.
    at = position * DIM + tl.arange(0, mask.shape[0])[:, None] * 0 + dims
    cos = tl.load(COS + at, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(SIN + at, mask=mask, other=0.0).to(tl.float32)
    return (one * cos + other * tl.where(dims < DIM // 2, -sin, sin)).to(dtype)


@triton.jit
def store_eight_bits(head, AT, SCALE, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Store a head (1, BLOCK), zeros outside of DIM, as eight bits and their scale."""
    column = tl.arange(0, BLOCK)
    wide = tl.reshape(head, [BLOCK]).to(tl.float32)
    store_row(wide, AT + column, SCALE, column < DIM)


@triton.jit
def _partner(dims, DIM: tl.constexpr):
    """Return the place of each number's partner in the other half."""
    half: tl.constexpr = DIM // 2
    partner = tl.where(dims < half, dims + half, dims - half)
    if half % 8 == 0:
        partner = tl.max_contiguous(partner, [1, 8])  # so that eight are loaded at once
    return partner
