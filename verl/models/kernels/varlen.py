"""One call of PyTorch's variable-length flash attention, forward and backward, without autograd.

`varlen_attn` differentiates one call. Attention that combines several calls needs their
log-sum-exp, and a backward pass with the output and the log-sum-exp of the whole.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Sequences(NamedTuple):
    """S consecutive query sequences, each with a key sequence: causally aligned, or all of it.

    The offsets are (S+1,) int32. The longest lengths are numbers on the host. A causal query sees
    `window` keys including its own (None: all).
    """

    query_offsets: Tensor
    key_offsets: Tensor
    longest_query: int
    longest_key: int
    causal: bool
    window: int | None = None

    @property
    def masked(self) -> tuple[bool, dict[str, int]]:
        """Return the kernel's arguments for causal masks and windows, which exclude each other."""
        if self.window is None:
            return self.causal, {}
        assert self.causal
        return False, {"window_size_left": self.window - 1, "window_size_right": 0}


def forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the output (Nq, Hq, D), and the log-sum-exp (Hq, Nq) in fp32.

    q (Nq, Hq, D), k and v (Nk, Hk, D) are bf16 or fp16 on CUDA.
    """
    causal, window = sequences.masked
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        sequences.query_offsets,
        sequences.key_offsets,
        sequences.longest_query,
        sequences.longest_key,
        0.0,  # dropout
        causal,
        False,  # return_debug_mask
        scale=scale,
        **window,
    )
    assert lse.shape == (q.shape[1], q.shape[0]), f"log-sum-exp of shape {tuple(lse.shape)}"

    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: Sequences,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v.

    With P = exp(scale * q k^T - lse) and D = rowsum(grad_out * out), the kernel computes dV = P^T
    grad_out and, through dS = P * (grad_out V^T - D), the gradients of q and k. Therefore `out` and
    `lse` may be those of attention to more keys than `k`: the gradients are then this part's share
    of the whole.
    """
    no_dropout = (
        torch.zeros(2, dtype=torch.uint64, device=q.device),
        torch.empty(0, device=q.device),
    )

    causal, window = sequences.masked
    return torch.ops.aten._flash_attention_backward(
        grad_out.contiguous(),
        q,
        k,
        v,
        out.contiguous(),
        lse.contiguous(),
        sequences.query_offsets,
        sequences.key_offsets,
        sequences.longest_query,
        sequences.longest_key,
        0.0,  # dropout
        causal,
        *no_dropout,
        scale=scale,
        **window,
    )
