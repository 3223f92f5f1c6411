"""Attention of responses that share a prompt, whose keys and values exist once.

It takes two kernel calls: every segment attends to itself causally, and all responses of a prompt,
joined and cut into pieces, attend to the whole prompt. Softmax over both sets of keys is the
average of the two outputs weighted by exp(log-sum-exp). In the backward pass each call gets the
output and log-sum-exp of the whole, and returns its exact share of the gradients
(`varlen.backward`).
"""

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.models.kernels import varlen
from verl.models.kernels.varlen import Sequences


class SharedParts(NamedTuple):
    """The calls over N packed tokens: `prompts` are P tokens of shared prompts, `responses` follow.

    The backward kernel works on blocks of keys in parallel, and a prompt has few blocks. Therefore
    each of C pieces of the responses gets its own copy of the prompt's keys.
    """

    own: Sequences  # every segment to itself
    across: Sequences  # C pieces of the responses of each shared prompt, each to its copy
    prompts: slice
    responses: slice
    copied: Tensor  # (C * P,) int64, the prompt token of each copied key
    # (C * P,) int64, the places of the copies: first copies of all prompt tokens, second copies ...
    copies: Tensor


def shared_prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, parts: SharedParts, scale: float
) -> Tensor:
    """Compute attention: q (N, Hq, D), k and v (N, Hk, D) -> (N, Hq, D)."""
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
    """Merge attention to another set of keys into `out` (n, H, D) and `lse` (H, n), in place.

    It computes in fp32.
    """
    if out.is_cuda:
        # triton is installed only with CUDA
        return importlib.import_module("verl.models.kernels.shared_prompts").merge_(
            out, lse, other, other_lse
        )
    share = torch.sigmoid(lse - other_lse).t()[..., None]
    out.copy_(torch.lerp(other.to(share.dtype), out.to(share.dtype), share))
    torch.logaddexp(lse, other_lse, out=lse)
