"""Rotary embedding of packed heads in Triton, forward and backward.

Every number is read and written once. transformers' formula, compiled for a symbolic number of
tokens, took 88 ms of a 1.49 s update on an H200 (Qwen2.5-1.5B, 65,536 tokens), with ten times the
memory traffic.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@torch.library.custom_op("verl::rotate_heads", mutates_args=())
def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> Tensor:
    """Compute x * cos + rotate_half(x) * sin, or the transpose of that map.

    x (1, H, N, D), cos and sin (1, N, D) -> the shape of x, stored as (1, N, H, D).
    """
    _, heads, tokens, dim = x.shape
    assert x.stride(3) == 1, "heads must be contiguous"
    assert cos.shape == sin.shape == (1, tokens, dim), (cos.shape, sin.shape, x.shape)
    assert cos.stride() == sin.stride(), "cos and sin must have the same strides"
    assert cos.stride(2) == 1, "cos and sin must be contiguous"
    out = x.new_empty(1, tokens, heads, dim)

    if tokens:
        _rotate[(tokens,)](
            x,
            x.stride(1),
            x.stride(2),
            cos,
            sin,
            cos.stride(1),
            out,
            heads,
            HALF=dim // 2,
            TRANSPOSED=transposed,
            BLOCK_H=triton.next_power_of_2(heads),
            BLOCK=triton.next_power_of_2(dim // 2),
            num_warps=2,
        )

    return out.transpose(1, 2)


@rotate_heads.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> Tensor:
    _, heads, tokens, dim = x.shape
    return x.new_empty(1, tokens, heads, dim).transpose(1, 2)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, transposed = inputs
    ctx.save_for_backward(cos, sin)
    ctx.transposed = transposed


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    if grad.stride(3) != 1:
        grad = grad.contiguous()
    return rotate_heads(grad, cos, sin, not ctx.transposed), None, None, None


rotate_heads.register_autograd(_backward, setup_context=_keep)


@triton.jit
def _rotate(
    X,
    x_head,
    x_token,
    COS,
    SIN,
    cos_token,
    OUT,
    heads,
    HALF: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    mask = (head < heads) & (dim < HALF)
    source = X + token * x_token + head * x_head + dim
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)

    cos = COS + token * cos_token + dim
    sin = SIN + token * cos_token + dim
    cos_low = tl.load(cos, mask=dim < HALF)
    cos_high = tl.load(cos + HALF, mask=dim < HALF)
    sin_low = tl.load(sin, mask=dim < HALF)
    sin_high = tl.load(sin + HALF, mask=dim < HALF)

    if TRANSPOSED:
        new_low = low * cos_low + high * sin_high
        new_high = high * cos_high - low * sin_low
    else:
        new_low = low * cos_low - high * sin_low
        new_high = high * cos_high + low * sin_high

    target = OUT + token * heads * 2 * HALF + head * 2 * HALF + dim
    tl.store(target, new_low.to(OUT.dtype.element_ty), mask=mask)
    tl.store(target + HALF, new_high.to(OUT.dtype.element_ty), mask=mask)
