"""Attention of responses that share a prompt, whose keys and values exist once.

Two kernel calls: every segment causally to itself, and all responses of a prompt, as one query sequence, to all of the
prompt. Softmax over both sets of keys is the average of the two outputs weighted by exp(log-sum-exp). In the backward
pass each call gets the output and log-sum-exp of the whole and gives its exact share of the gradients
(`varlen.backward`).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.models import varlen
from verl.models.varlen import Sequences


class SharedParts(NamedTuple):
    """The calls over N packed tokens, of which `prompts` are those of shared prompts, `responses` those after them."""

    own: Sequences  # every segment to itself
    across: Sequences  # the responses of each shared prompt to it
    prompts: slice
    responses: slice


def shared_prompt_attention(q: Tensor, k: Tensor, v: Tensor, parts: SharedParts, scale: float) -> Tensor:
    """(N, Hq, D), (N, Hk, D), (N, Hk, D) -> (N, Hq, D)."""
    return _SharedPromptAttention.apply(q, k, v, parts, scale)  # pyright: ignore[reportReturnType]


class _SharedPromptAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: SharedParts, scale: float) -> Tensor:
        prompts, responses = parts.prompts, parts.responses
        out, lse = varlen.forward(q, k, v, parts.own, scale)
        other, other_lse = varlen.forward(q[responses], k[prompts], v[prompts], parts.across, scale)
        _merge_(out[responses], lse[:, responses], other, other_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        parts: SharedParts = ctx.parts
        prompts, responses = parts.prompts, parts.responses
        grad_q, grad_k, grad_v = varlen.backward(grad_out, q, k, v, out, lse, parts.own, ctx.scale)
        more_q, more_k, more_v = varlen.backward(
            grad_out[responses],
            q[responses],
            k[prompts],
            v[prompts],
            out[responses],
            lse[:, responses],
            parts.across,
            ctx.scale,
        )
        grad_q[responses] += more_q
        grad_k[prompts] += more_k
        grad_v[prompts] += more_v
        return grad_q, grad_k, grad_v, None, None


def _merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Make `out` (n, H, D) and `lse` (H, n) those of attention to both sets of keys, in place, by way of fp32."""
    share = torch.sigmoid(lse - other_lse).t()[..., None]
    out.copy_(torch.lerp(other.to(share.dtype), out.to(share.dtype), share))
    torch.logaddexp(lse, other_lse, out=lse)
