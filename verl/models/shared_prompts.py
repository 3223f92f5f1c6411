"""Attention in several kernel calls: of responses that share a prompt, and of pictures.

Every segment attends to itself causally. In a second call all responses of a prompt, whose keys and
values exist once, attend to the whole prompt, joined and cut into pieces. In a third the tokens of
a picture attend to those behind them: in reverse order, that is causal, too. Softmax over all sets
of keys is the average of the outputs weighted by exp(log-sum-exp). In the backward pass each call
gets the output and log-sum-exp of the whole, and returns its exact share of the gradients
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

    across: Sequences  # C pieces of the responses of each shared prompt, each to its copy
    prompts: slice
    responses: slice
    copied: Tensor  # (C * P,) int64, the prompt token of each copied key
    # (C * P,) int64, the places of the copies: first copies of all prompt tokens, second copies ...
    copies: Tensor


class AheadPart(NamedTuple):
    """Tokens that see later ones: each run but its last token, in reverse order.

    `queries` (r,) are these packed tokens, and `keys` (r,) the ones behind each.
    """

    sequences: Sequences
    queries: Tensor
    keys: Tensor


class Calls(NamedTuple):
    """The kernel calls of one attention over N packed tokens."""

    own: Sequences  # every segment to itself
    shared: SharedParts | None = None
    ahead: AheadPart | None = None


def joined_attention(q: Tensor, k: Tensor, v: Tensor, calls: Calls, scale: float) -> Tensor:
    """Compute attention: q (N, Hq, D), k and v (N, Hk, D) -> (N, Hq, D)."""
    return _JoinedAttention.apply(q, k, v, calls, scale)  # pyright: ignore[reportReturnType]


class _JoinedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: Calls, scale: float) -> Tensor:
        out, lse = varlen.forward(q, k, v, calls.own, scale)

        if calls.shared is not None:
            parts = calls.shared
            responses = parts.responses
            keys = k[parts.prompts][parts.copied]
            values = v[parts.prompts][parts.copied]
            other, other_lse = varlen.forward(q[responses], keys, values, parts.across, scale)
            _merge_(out[responses], lse[:, responses], other, other_lse)

        if calls.ahead is not None:
            sequences, queries, later = calls.ahead
            seen = out[queries]
            seen_lse = lse[:, queries]
            other, other_lse = varlen.forward(q[queries], k[later], v[later], sequences, scale)
            _merge_(seen, seen_lse, other, other_lse)
            out[queries] = seen
            lse[:, queries] = seen_lse

        ctx.save_for_backward(q, k, v, out, lse)
        ctx.calls = calls
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        calls: Calls = ctx.calls
        whole = varlen.backward(grad_out, q, k, v, out, lse, calls.own, ctx.scale)
        if calls.shared is not None:
            _add_shared_(whole, grad_out, (q, k, v, out, lse), calls.shared, ctx.scale)

        if calls.ahead is not None:
            sequences, queries, later = calls.ahead
            own = q[queries], k[later], v[later], out[queries], lse[:, queries]
            more = varlen.backward(grad_out[queries], *own, sequences, ctx.scale)
            for grad, places, part in zip(whole, (queries, later, later), more):
                grad.index_add_(0, places, part)  # no place comes twice

        return *whole, None, None


def _add_shared_(
    whole: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    parts: SharedParts,
    scale: float,
) -> None:
    """Add the gradients of responses that attend to their prompts.

    `saved` are q, k, v, the output and the log-sum-exp. They are handed over, since checkpointing
    lets the backward pass read them from the context only once.
    """
    q, k, v, out, lse = saved
    grad_q, grad_k, grad_v = whole
    prompts = parts.prompts
    responses = parts.responses
    more_q, more_k, more_v = varlen.backward(
        grad_out[responses],
        q[responses],
        k[prompts][parts.copied],
        v[prompts][parts.copied],
        out[responses],
        lse[:, responses],
        parts.across,
        scale,
    )

    grad_q[responses] += more_q
    for grad, more in ((grad_k, more_k), (grad_v, more_v)):
        own = grad[prompts]
        own += more[parts.copies].view(-1, *own.shape).sum(0)


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
    mixed = torch.lerp(other.to(share.dtype), out.to(share.dtype), share)
    out.copy_(mixed)
    torch.logaddexp(lse, other_lse, out=lse)
