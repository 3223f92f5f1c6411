"""Attention of responses that share a prompt, whose keys and values exist once.

Two kernel calls: every segment causally to itself, and all responses of a prompt, end to end and
cut into pieces, to all of the prompt. Softmax over both sets of keys is the average of the two
outputs weighted by exp(log-sum-exp). In the backward pass each call gets the output and log-sum-exp
of the whole and gives its exact share of the gradients (`varlen.backward`).
"""

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.models.kernels import varlen
from verl.models.kernels.varlen import Sequences


class SharedParts(NamedTuple):
    """The calls over N packed tokens, of which `prompts` are those of P tokens of shared prompts,
    `responses` those after them.

    The backward kernel works on blocks of keys at once, of which a prompt has few: each of C pieces
    of the responses gets a copy of the prompt's keys to itself.
    """

    own: Sequences  # every segment to itself
    across: Sequences  # C pieces of the responses of each shared prompt, each to its copy
    prompts: slice
    responses: slice
    copied: Tensor  # (C * P,) int64, of which prompt token each copied key is
    # (C * P,) int64, where the copies of the prompt tokens are, the first of all, the second of all
    # ...
    copies: Tensor


def shared_prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, parts: SharedParts, scale: float
) -> Tensor:
    """(N, Hq, D), (N, Hk, D), (N, Hk, D) -> (N, Hq, D)."""
    return _SharedPromptAttention.apply(q, k, v, parts, scale)  # pyright: ignore[reportReturnType]


class _SharedPromptAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: SharedParts, scale: float
    ) -> Tensor:
        prompts = parts.prompts
        responses = parts.responses
        out, lse = varlen.forward(q, k, v, parts.own, scale)
        keys = k[prompts][parts.copied]
        values = v[prompts][parts.copied]
        other, other_lse = varlen.forward(q[responses], keys, values, parts.across, scale)
        _merge_(out[responses], lse[:, responses], other, other_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.parts = parts
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        parts: SharedParts = ctx.parts
        prompts = parts.prompts
        responses = parts.responses
        grad_q, grad_k, grad_v = varlen.backward(grad_out, q, k, v, out, lse, parts.own, ctx.scale)
        more_q, more_k, more_v = varlen.backward(
            grad_out[responses],
            q[responses],
            k[prompts][parts.copied],
            v[prompts][parts.copied],
            out[responses],
            lse[:, responses],
            parts.across,
            ctx.scale,
        )

        grad_q[responses] += more_q
        for grad, more in ((grad_k, more_k), (grad_v, more_v)):
            own = grad[prompts]
            own += more[parts.copies].view(-1, *own.shape).sum(0)

        return grad_q, grad_k, grad_v, None, None


def _merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Make `out` (n, H, D) and `lse` (H, n) those of attention to both sets of keys, in place, by
    way of fp32."""
    if out.is_cuda:
        # Triton exists beside CUDA only.
        return importlib.import_module("verl.models.kernels.shared_prompts").merge_(
            out, lse, other, other_lse
        )
    share = torch.sigmoid(lse - other_lse).t()[..., None]
    out.copy_(torch.lerp(other.to(share.dtype), out.to(share.dtype), share))
    torch.logaddexp(lse, other_lse, out=lse)
