"""Check the tensors of attention over pages before a kernel reads them."""

import torch
from torch import Tensor

from verl.rollout.eight_bits import LARGEST
from verl.rollout.embedded.kernels.decode_launch import SplitWorkspace


def partial_results(
    workspace: SplitWorkspace | None,
    rows: int,
    heads: int,
    kv_heads: int,
    num_splits: int,
    value_dim: int,
) -> SplitWorkspace:
    assert workspace is not None, "more than one split a row needs a workspace"
    count = rows * heads * num_splits
    assert workspace.lse.numel() >= count, (
        f"{count} partial results in a workspace for {workspace.lse.numel()}"
    )
    assert workspace.out.numel() >= count * value_dim, (
        f"the workspace is for values of {workspace.out.shape[1]}"
    )
    assert workspace.arrived.numel() >= rows * kv_heads, (
        f"the workspace is for {workspace.arrived.numel()} key heads"
    )
    return workspace


def check_shapes(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, out: Tensor, sinks: Tensor | None
) -> None:
    rows, heads, dim = q.shape
    num_pages, kv_heads, page_size, value_dim = values.shape
    assert keys.shape == (num_pages, kv_heads, page_size, dim), (keys.shape, values.shape)
    assert heads % kv_heads == 0, f"{heads} query heads for {kv_heads} key heads"
    assert page_size >= 8, f"pages of {page_size} tokens"
    assert page_size & (page_size - 1) == 0, f"pages of {page_size} tokens, not a power of two"
    assert q.stride(2) == keys.stride(3) == values.stride(3) == table.stride(1) == 1, (
        "last dimensions must be contiguous"
    )

    assert out.shape == (rows, heads, value_dim), f"out must be (b, Hq, Dv), got {tuple(out.shape)}"
    assert out.is_contiguous(), "out must be contiguous"
    assert sinks is None or (sinks.shape == (heads,) and sinks.dtype == torch.float32), (
        "sinks must be (Hq,) fp32"
    )


def scale_strides_of(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> tuple[int | None, ...]:
    """Return the strides of a page and a head of the scales; None without scales."""
    if key_scales is None or value_scales is None:
        assert key_scales is value_scales is None, "both or none have scales"
        assert q.dtype == keys.dtype == values.dtype, (q.dtype, keys.dtype, values.dtype)
        return None, None

    assert keys.dtype == values.dtype, (keys.dtype, values.dtype)
    assert keys.dtype in LARGEST, keys.dtype
    assert key_scales.shape == value_scales.shape == keys.shape[:3], key_scales.shape
    assert key_scales.stride() == value_scales.stride(), "scales of one kind of page"
    assert key_scales.stride(2) == 1, "last dimensions must be contiguous"
    return key_scales.stride()[:2]
