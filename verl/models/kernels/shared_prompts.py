"""The average of two attentions in Triton. Every number is read and written once.

Plain operations with fp32 tensors took 8 % of a log-prob pass on an H200 (Qwen2.5-1.5B, 16
responses of 1,024 tokens per prompt).
"""

import triton
import triton.language as tl
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Compute `verl.models.shared_prompts._merge_`.

    The heads of a token must be contiguous in `out` and `other`.
    """
    tokens, heads, dim = out.shape
    assert out.stride()[1:] == other.stride()[1:] == (dim, 1), (out.stride(), other.stride())

    if tokens:
        _merge[(tokens,)](
            out,
            out.stride(0),
            lse,
            *lse.stride(),
            other,
            other.stride(0),
            other_lse,
            *other_lse.stride(),
            heads,
            dim,
            BLOCK_H=triton.next_power_of_2(heads),
            BLOCK=triton.next_power_of_2(dim),
            num_warps=2,
        )


@triton.jit
def _merge(
    OUT,
    out_token,
    LSE,
    lse_head,
    lse_token,
    OTHER,
    other_token,
    OTHER_LSE,
    other_lse_head,
    other_lse_token,
    heads,
    dim,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK)
    lse_place = LSE + head * lse_head + token * lse_token
    lse = tl.load(lse_place, mask=head < heads, other=0.0)
    other_lse_place = OTHER_LSE + head * other_lse_head + token * other_lse_token
    other_lse = tl.load(other_lse_place, mask=head < heads, other=0.0)
    share = 1 / (1 + tl.exp(other_lse - lse))
    place = head[:, None] * dim + column[None, :]

    mask = (head[:, None] < heads) & (column[None, :] < dim)
    out = tl.load(OUT + token * out_token + place, mask=mask).to(tl.float32)
    other = tl.load(OTHER + token * other_token + place, mask=mask).to(tl.float32)
    merged = other + share[:, None] * (out - other)
    tl.store(OUT + token * out_token + place, merged.to(OUT.dtype.element_ty), mask=mask)
    largest = tl.maximum(lse, other_lse)
    both = largest + tl.log(tl.exp(lse - largest) + tl.exp(other_lse - largest))
    tl.store(lse_place, both, mask=head < heads)
