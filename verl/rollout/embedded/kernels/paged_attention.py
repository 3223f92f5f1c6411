"""Attention of one new token a row over the paged cache, for grouped queries, with split keys.

The keys of a row are cut into splits. A program computes one of them for the query heads of one key head and leaves a
partial result: its output, and the log2 of its softmax denominator. A second kernel merges the partials of a row.

Nothing here allocates, or reads a tensor on the host, so every call may stand in a CUDA graph: what changes from step
to step is read from tensors at fixed addresses, and the grid depends on shapes alone.

Rows of one prompt that are neighbours in the batch share its pages through the L2 cache. A pass of its own over shared
prefixes never paid: with 16 rows a prompt on an H200, 170 us a layer at best against 159 without it (Qwen2.5-1.5B,
1,024 rows), 325 against 294 (7B, 1,024 rows), 61 against 56 (1.5B, 256 rows). Nor did programs that take 2 or 4 rows
and read what these share once: with 256 tokens shared, two rows won while each had 50 of its own (106 us against 118 at
7B, 1,024 rows), were even at 200 (171 against 172) and lost at 300 (80 against 67 at 256 rows).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = tl.constexpr(1.4426950408889634)
# More splits fill the device at small batches; but to merge them takes 4 us, which they must win back first.
_PROGRAMS_PER_SM = 2
_MAX_SPLITS = 64
_MERGED_VALUES = 2048  # of partial results that a warp merges at a time: 64 registers of a thread


class DecodeConfig(NamedTuple):
    """`block_n` keys at a time (a power of two >= 16), `num_stages - 1` blocks being loaded."""

    block_n: int
    num_warps: int
    num_stages: int


class SplitWorkspace(NamedTuple):
    """fp32 memory for n partial results: outputs (n, Dv) and log2 of the softmax denominators (n,)."""

    out: Tensor
    lse: Tensor


def split_workspace(
    rows: int, heads: int, value_dim: int, num_splits: int, device: torch.device | str
) -> SplitWorkspace:
    """Room for `num_splits` partial results of each of rows x heads queries.

    One workspace serves all layers in turn if it is for the widest, and every batch whose rows x splits are not more.
    """
    count = rows * heads * num_splits
    return SplitWorkspace(
        torch.empty(count, value_dim, dtype=torch.float32, device=device),
        torch.empty(count, dtype=torch.float32, device=device),
    )


def choose_num_splits(rows: int, kv_heads: int, num_sms: int) -> int:
    """Into how many splits a row's keys are cut so that each of `num_sms` multiprocessors has a few to work on.

    A function of the batch alone: how long the rows are is known on the device only.
    """
    return max(1, min(_MAX_SPLITS, _PROGRAMS_PER_SM * num_sms // (rows * kv_heads)))


def fixed_num_splits(table_width: int, page_size: int, split_tokens: int, window: int | None = None) -> int:
    """How many splits of `split_tokens` tokens the longest row has that fits in `table_width` pages."""
    splits = triton.cdiv(table_width * page_size, split_tokens)
    # At worst only the first key of a window stands in the first of its splits.
    return splits if window is None else min(splits, triton.cdiv(window - 1, split_tokens) + 1)


def decode_config(dim: int, value_dim: int, kv_heads: int, dtype: torch.dtype) -> DecodeConfig:
    """A function of what a layer is, never of the batch: other blocks give other bits.

    Small blocks let more programs live on a multiprocessor: with two key heads, 512 programs took 29 us with these and
    33 with three stages. With four key heads there are programs enough, and three stages took 61 us for two stages' 67.
    """
    widest = max(dim, value_dim)
    if dtype == torch.float32:
        return DecodeConfig(block_n=32, num_warps=8, num_stages=2)
    if widest <= 64:
        return DecodeConfig(block_n=32, num_warps=2, num_stages=3)
    stages = 2 if widest <= 128 and kv_heads < 4 else 3
    return DecodeConfig(block_n=64 if widest <= 128 else 32, num_warps=4, num_stages=stages)


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    num_splits: int = 1,
    split_tokens: int | None = None,
    workspace: SplitWorkspace | None = None,
    config: DecodeConfig | None = None,
) -> None:
    """Write to `out` (b, Hq, Dv) what the newest token of each of b rows attends to.

    q (b, Hq, D); keys (num_pages, Hk, page_size, D) and values (num_pages, Hk, page_size, Dv), page_size a power of two
    >= 8; all with any strides but a contiguous last dimension. `table` (S, W) int32: the pages of a slot, in order.
    `slots` (b,) int32: the slot of a row. `positions` (S,) int32: position of the newest token of a slot, whose key is
    in its page already. The row sees the keys 0..position, with `window` the newest of them; at -1 its output is 0.
    `cap` softly caps the scaled scores; `sinks` (Hq,) fp32 are scores of one more key a head, which has no value.

    A row's keys are cut into `num_splits` splits of equal size or, with `split_tokens` (a multiple of the block), into
    splits of so many tokens, as many as `fixed_num_splits` says: its output then depends on its own query and keys
    alone, to the last bit. Where a row has more than one split, `workspace` must have room for all of them.
    """
    _check(q, keys, values, table, out, sinks)
    rows, heads, dim = q.shape
    kv_heads, page_size, value_dim = values.shape[1:]
    config = config or decode_config(dim, value_dim, kv_heads, q.dtype)
    if split_tokens is not None:
        assert split_tokens % config.block_n == 0, f"splits of {split_tokens} tokens in blocks of {config.block_n}"
        num_splits = fixed_num_splits(table.shape[1], page_size, split_tokens, window)
    single = num_splits == 1
    partials = (out, None) if single else _room(workspace, rows * heads * num_splits, value_dim)
    # Scores are in base 2, because exp2 is one instruction; with a cap, `scale` leads to multiples of it.
    scale, cap = (scale * _LOG2_E.value, None) if cap is None else (scale / cap, cap * _LOG2_E.value)
    _attend[(rows, kv_heads, num_splits)](
        q, keys, values, table, slots, positions, sinks, *partials, scale, cap, window,
        *q.stride()[:2], *keys.stride()[:3], *values.stride()[:3], table.stride(0),
        GROUP=heads // kv_heads, DIM=dim, VALUE_DIM=value_dim, PAGE_SIZE=page_size, SPLIT_TOKENS=split_tokens,
        BLOCK_M=_block(heads // kv_heads), BLOCK_N=config.block_n, BLOCK_DIM=_block(dim), BLOCK_VALUE=_block(value_dim),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if not single:
        _merge_splits(partials, out, slots, positions, window, num_splits, split_tokens, config.block_n)


def _merge_splits(
    partials: tuple[Tensor, Tensor | None], out: Tensor, slots: Tensor, positions: Tensor,
    window: int | None, num_splits: int, split_tokens: int | None, block_n: int,
) -> None:  # fmt: skip
    rows, heads, value_dim = out.shape
    block_value = _block(value_dim)
    # Fixed splits are merged in blocks of one size, whatever the width of the table: the order of a sum is its bits.
    block_s = min(16, _MERGED_VALUES // block_value, 16 if split_tokens else triton.next_power_of_2(num_splits))
    block_h = min(4, _MERGED_VALUES // (block_s * block_value))
    _merge[(rows, triton.cdiv(heads, block_h))](
        *partials, out, slots, positions, window, num_splits,
        HEADS=heads, VALUE_DIM=value_dim, SPLIT_TOKENS=split_tokens, BLOCK_N=block_n,
        BLOCK_H=block_h, BLOCK_S=block_s, BLOCK_VALUE=block_value, num_warps=1,
    )  # fmt: skip


def _room(workspace: SplitWorkspace | None, count: int, value_dim: int) -> SplitWorkspace:
    assert workspace is not None, "more than one split a row needs a workspace"
    assert workspace.lse.numel() >= count, f"{count} partial results in a workspace for {workspace.lse.numel()}"
    assert workspace.out.numel() >= count * value_dim, f"the workspace is for values of {workspace.out.shape[1]}"
    return workspace


def _block(count: int) -> int:
    """Matrix units work on 16 or more."""
    return max(16, triton.next_power_of_2(count))


def _check(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, out: Tensor, sinks: Tensor | None) -> None:
    rows, heads, dim = q.shape
    num_pages, kv_heads, page_size, value_dim = values.shape
    assert keys.shape == (num_pages, kv_heads, page_size, dim), (keys.shape, values.shape)
    assert heads % kv_heads == 0, f"{heads} query heads for {kv_heads} key heads"
    assert page_size >= 8, f"pages of {page_size} tokens"
    assert page_size & (page_size - 1) == 0, f"pages of {page_size} tokens, not a power of two"
    assert q.dtype == keys.dtype == values.dtype, (q.dtype, keys.dtype, values.dtype)
    assert q.stride(2) == keys.stride(3) == values.stride(3) == table.stride(1) == 1, (
        "last dimensions must be contiguous"
    )
    assert out.shape == (rows, heads, value_dim), f"out must be (b, Hq, Dv), got {tuple(out.shape)}"
    assert out.is_contiguous(), "out must be contiguous"
    assert sinks is None or (sinks.shape == (heads,) and sinks.dtype == torch.float32), "sinks must be (Hq,) fp32"


@triton.jit
def _span(slot, POSITIONS, window, num_splits, SPLIT_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys [first, stop) that a row sees, and the size of its splits, which are counted from `origin`.

    Splits and blocks begin at multiples of their size, so that the first block of a row holds a key that it sees.
    """
    stop = tl.load(POSITIONS + slot) + 1
    first = 0
    if window is not None:
        first = tl.maximum(stop - window, 0)
    if SPLIT_TOKENS is None:
        origin = first // BLOCK_N * BLOCK_N
        size = tl.cdiv(tl.maximum(tl.cdiv(stop - origin, num_splits), 1), BLOCK_N) * BLOCK_N
    else:
        origin = first // SPLIT_TOKENS * SPLIT_TOKENS
        size = SPLIT_TOKENS
    return first, stop, origin, size


@triton.jit
def _attend(
    Q, KEYS, VALUES, TABLE, SLOTS, POSITIONS, SINKS, OUT, LSE, scale, cap, window,
    q_row, q_head, key_page, key_head, key_token, value_page, value_head, value_token, table_row,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """One split of one row, for the GROUP query heads of one key head, with a running softmax.

    OUT and LSE are partials (b, Hq, num_splits, ...); without LSE, OUT (b, Hq, Dv) is the result itself.
    """
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot = tl.load(SLOTS + row).to(tl.int64)
    first, stop, origin, size = _span(slot, POSITIONS, window, tl.num_programs(2), SPLIT_TOKENS, BLOCK_N)
    begin = tl.maximum(origin + split * size, first)
    end = tl.minimum(origin + (split + 1) * size, stop)
    if LSE is not None and begin >= end:
        return
    group = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + group
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    q_mask = (group[:, None] < GROUP) & (dims < DIM)
    q = tl.load(Q + row * q_row + heads[:, None] * q_head + dims, mask=q_mask, other=0.0)
    sink = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if SINKS is not None:
        # A sink is a key without a value; the row's first split counts it.
        sink = tl.load(SINKS + heads, mask=(group < GROUP) & (split == 0), other=float("-inf")) * _LOG2_E
    m, total, acc = sink, tl.zeros_like(sink), tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
    pages, keys, values = TABLE + slot * table_row, KEYS + kv_head * key_head, VALUES + kv_head * value_head
    offsets = tl.arange(0, BLOCK_N)
    start = begin // BLOCK_N * BLOCK_N
    page = tl.load(pages + (start + offsets) // PAGE_SIZE, mask=start + offsets < end, other=0)
    for block in range(start, end, BLOCK_N):
        tokens = block + offsets
        seen = (tokens >= begin) & (tokens < end)
        # Page ids come one block ahead: an address that waits for a load in its own block could not be pipelined.
        later = tokens + BLOCK_N
        next_page = tl.load(pages + later.to(tl.uint32) // PAGE_SIZE, mask=later < end, other=0)
        within = tokens.to(tl.uint32) % PAGE_SIZE
        k = _read(keys, page, key_page, within, key_token, seen, DIM, BLOCK_DIM)
        v = _read(values, page, value_page, within, value_token, seen, VALUE_DIM, BLOCK_VALUE)
        m, total, acc = _weigh(q, k, v, seen, m, total, acc, scale, cap)
        page = next_page
    if SINKS is not None:
        total += tl.where(sink == float("-inf"), 0.0, tl.exp2(sink - m))
    place = row * GROUP * tl.num_programs(1) + heads
    if LSE is not None:
        place = place * tl.num_programs(2) + split
        tl.store(LSE + place, m + tl.log2(total), mask=group < GROUP)
    _store(OUT, place, group < GROUP, acc, total, VALUE_DIM)


@triton.jit
def _read(CACHE, page, page_stride, within, token_stride, seen, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Keys or values (N, BLOCK) of N tokens."""
    dims = tl.arange(0, BLOCK)[None, :]
    # 64-bit: pages of all layers interleave, so the stride of a page is large.
    at = page.to(tl.int64) * page_stride + within * token_stride
    # Masked, not only for the traffic: memory that no token was written to may hold NaN, and 0 * NaN is NaN.
    mask = seen[:, None] if DIM == BLOCK else seen[:, None] & (dims < DIM)
    return tl.load(CACHE + at[:, None] + dims, mask=mask, other=0.0)


@triton.jit
def _weigh(q, k, v, seen, m, total, acc, scale, cap):
    """One step of the running softmax: its maximum, the sum of its weights, and that of weighted values."""
    # "ieee": fp32 operands would be rounded to TF32 otherwise.
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if cap is not None:
        s = cap * (2 * tl.sigmoid(2 * s) - 1)  # tanh
    s = tl.where(seen[None, :], s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - new_m[:, None])
    alpha = tl.exp2(m - new_m)
    total = total * alpha + tl.sum(p, 1)
    return new_m, total, tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")


@triton.jit
def _store(OUT, place, mask, acc, total, VALUE_DIM: tl.constexpr):
    """Divide and write; a query that saw no key gives 0."""
    dims = tl.arange(0, acc.shape[1])[None, :]
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = OUT + place[:, None] * VALUE_DIM + dims
    tl.store(at, result.to(OUT.dtype.element_ty), mask=mask[:, None] & (dims < VALUE_DIM))


@triton.jit(do_not_specialize=["num_splits"])
def _merge(
    PARTIAL_OUT, PARTIAL_LSE, OUT, SLOTS, POSITIONS, window, num_splits,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, SPLIT_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """The output of BLOCK_H query heads of one row: partials, weighted by their denominators, in a fixed order.

    Only partials that were written are read, BLOCK_S of a head at a time, counted from the row's first.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    _, stop, origin, size = _span(tl.load(SLOTS + row), POSITIONS, window, num_splits, SPLIT_TOKENS, BLOCK_N)
    count = tl.cdiv(stop - origin, size)
    query = row * HEADS + head
    # Splits are the first axis, so that the sum over them stays within a thread.
    dims = tl.arange(0, BLOCK_VALUE)[None, None, :]
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_VALUE], tl.float32)
    for first in range(0, count, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)[:, None]
        written = (split < count) & (head < HEADS)[None, :]
        place = query[None, :] * num_splits + split
        lse = tl.load(PARTIAL_LSE + place, mask=written, other=float("-inf"))
        at = PARTIAL_OUT + place[:, :, None] * VALUE_DIM + dims
        part = tl.load(at, mask=written[:, :, None] & (dims < VALUE_DIM), other=0.0)
        new_m = tl.maximum(m, tl.max(lse, 0))
        weight = tl.exp2(lse - new_m[None, :])
        alpha = tl.exp2(m - new_m)
        total = total * alpha + tl.sum(weight, 0)
        acc = acc * alpha[:, None] + tl.sum(part * weight[:, :, None], 0)
        m = new_m
    _store(OUT, query, head < HEADS, acc, total, VALUE_DIM)
