"""Compute attention of one new token a row over the paged cache, for grouped queries.

The keys of a row are cut into splits. A program computes one of them for the query heads of one key
head and leaves a partial result: its output, and the log2 of its softmax denominator. The last
program of a row to end merges them, in the order of the splits. A program also rotates its query
and new key if these come straight from the projections, and stores the new key and value: a
separate kernel for that took 3 us a layer.

Nothing here allocates, or reads a tensor on the host, so every call can be part of a CUDA graph:
values that change from step to step are read from tensors at fixed addresses, and the grid depends
on shapes alone.

Rows of one prompt that are neighbors in the batch share its pages through the L2 cache. Where many
rows share many tokens, `shared_prefix` reads these once for several rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.rollout.embedded.kernels.decode_launch import (
    DecodeConfig,
    SplitWorkspace,
    decode_config,
    fixed_num_splits,
    padded,
)
from verl.rollout.embedded.kernels.fresh_tokens import (
    load_with_partners,
    store_eight_bits,
    turned,
)
from verl.rollout.embedded.kernels.page_blocks import weigh_pages
from verl.rollout.embedded.kernels.paged_checks import (
    check_shapes,
    partial_results,
    scale_strides_of,
)
from verl.rollout.embedded.kernels.running_softmax import merged, store_mean, weigh_one
from verl.rollout.embedded.kernels.shared_prefix import (
    SharedPrefixes,
    attend_prefixes,
    overlaps,
    with_prefix,
)
from verl.rollout.embedded.kernels.warp_blocks import warp_lookups, weigh_by_warps

_LOG2_E = tl.constexpr(1.4426950408889634)


class Fresh(NamedTuple):
    """The newest token of each of b rows, straight from the projections.

    Its query and key are not rotated, and its key is not in its page. No other row of the batch
    may see it.
    """

    keys: Tensor  # (b, Hk, D), with the strides of the queries
    values: Tensor  # (b, Hk, Dv), likewise
    cos: Tensor  # (positions, D)
    sin: Tensor
    query_norm: Tensor | None  # (D,): each head is RMS-normed first (Qwen3)
    key_norm: Tensor | None
    eps: float
    shift: float = 0.0  # added to the norms' weights


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    out: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    num_splits: int = 1,
    split_tokens: int | None = None,
    workspace: SplitWorkspace | None = None,
    config: DecodeConfig | None = None,
    fresh: Fresh | None = None,
    prefixes: SharedPrefixes | None = None,
) -> None:
    """Compute attention of the newest token of each of b rows; write it to `out` (b, Hq, Dv).

    A row sees the keys of positions 0 to its own, or the newest `window` of them.

    q, keys and values may have any strides but a contiguous last dimension; `out` is contiguous.
    The page size is a power of two >= 8.

    Args:
        q: (b, Hq, D).
        keys: (num_pages, Hk, page_size, D).
        values: (num_pages, Hk, page_size, Dv).
        table: (S, W) int32, the pages of a slot, in order.
        slots: (b,) int32, the slot of a row.
        positions: (S,) int32, position of the newest token of a slot. Its key is in its page
            already, unless it is given as `fresh`. At -1, which no fresh token may have, the output
            is 0.
        key_scales: (num_pages, Hk, page_size) fp32, if keys and values are in eight bits.
        value_scales: likewise.
        scale: multiplies the scores.
        window: keys that a row sees, its own included; None: all.
        cap: softly caps the scaled scores.
        sinks: (Hq,) fp32, scores of one more key a head, which has no value.
        num_splits: splits of equal size that a row's keys are cut into.
        split_tokens: tokens of a split instead, a multiple of the block. There are then as many
            splits as `fixed_num_splits` returns, and the output of a row depends on its own query
            and keys alone, to the last bit.
        workspace: room for the partial results of all splits; needed for more than one split a row.
        config: None: `decode_config` chooses.
        fresh: the newest tokens, to be rotated (Su et al. 2021, equation 34, halves apart) and put
            into their pages. In eight bits, a row takes the exact numbers of its own token.
        prefixes: blocks of rows with shared pages, which are read once a block. Only for a single
            split, and neither with a window nor with fresh tokens.
    """
    check_shapes(q, keys, values, table, out, sinks)
    scale_strides = scale_strides_of(q, keys, values, key_scales, value_scales)
    rows, heads, dim = q.shape
    kv_heads, page_size, value_dim = values.shape[1:]
    config = config or decode_config(
        dim,
        value_dim,
        q.dtype,
        eight_bits=key_scales is not None,
        programs=rows * kv_heads * num_splits if split_tokens is None else None,
        shares=prefixes is not None,
    )

    if split_tokens is not None:
        assert split_tokens % config.block_n == 0, (
            f"splits of {split_tokens} tokens in blocks of {config.block_n}"
        )
        num_splits = fixed_num_splits(table.shape[1], page_size, split_tokens, window)

    partials = (None, None, None)
    if num_splits > 1:
        partials = partial_results(workspace, rows, heads, kv_heads, num_splits, value_dim)

    news = (None,) * len(Fresh._fields)
    if fresh is not None:
        assert fresh.keys.stride()[:2] == fresh.values.stride()[:2] == q.stride()[:2], (
            "one projection's q, k and v"
        )
        assert dim == value_dim, f"keys of {dim} numbers, values of {value_dim}"
        news = tuple(fresh)

    # Scores are in base 2, because exp2 is one instruction. With a cap, `scale` gives multiples of
    # the cap.
    if cap is None:
        scale = scale * _LOG2_E.value
    else:
        scale = scale / cap
        cap = cap * _LOG2_E.value

    covered = (None, None, None)
    if prefixes is not None:
        assert num_splits == 1, f"shared pages and {num_splits} splits"
        assert window is fresh is split_tokens is None, "shared pages are attended to as a whole"
        scales = (key_scales, value_scales)
        partial = attend_prefixes(
            prefixes,
            q,
            keys,
            values,
            scales,
            scale_strides,
            table,
            slots,
            scale=scale,
            cap=cap,
        )
        covered = (prefixes.covered, *partial)

    group = heads // kv_heads
    # A product takes at least 16 keys, and a warp has registers for 16 heads of 128 numbers.
    by_warps = (
        key_scales is None
        and q.dtype != torch.float32
        and padded(group) == 16
        and config.block_n >= 16 * config.num_warps
    )

    begins_early = prefixes is not None and overlaps(q.device)
    options = dict(config.options)
    if begins_early:
        options["launch_pdl"] = True  # Triton's backend for AMD has no such option

    _attend[(rows, kv_heads, num_splits)](
        q,
        *news,
        keys,
        values,
        key_scales,
        value_scales,
        table,
        slots,
        positions,
        sinks,
        out,
        *partials,
        *covered,
        scale,
        cap,
        window,
        *q.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        *scale_strides,
        table.stride(0),
        GROUP=group,
        DIM=dim,
        VALUE_DIM=value_dim,
        PAGE_SIZE=page_size,
        SPLIT_TOKENS=split_tokens,
        BLOCK_M=padded(group),
        BLOCK_N=config.block_n,
        BLOCK_DIM=padded(dim),
        BLOCK_VALUE=padded(value_dim),
        WARPS=config.num_warps if by_warps else 1,
        OVERLAPS=begins_early,
        **options,
    )


@triton.jit
def _span(
    slot,
    POSITIONS,
    covered,
    window,
    num_splits,
    SPLIT_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return the keys [first, stop) that a row sees, and the origin and size of its splits.

    The first `covered` keys are left out.

    Splits and blocks begin at multiples of their size, so that the first block of a row holds a key
    that it sees.
    """
    stop = tl.load(POSITIONS + slot) + 1
    first = covered
    if window is not None:
        first = tl.maximum(stop - window, covered)
    if SPLIT_TOKENS is None:
        origin = first // BLOCK_N * BLOCK_N
        size = tl.cdiv(tl.maximum(tl.cdiv(stop - origin, num_splits), 1), BLOCK_N) * BLOCK_N
    else:
        origin = first // SPLIT_TOKENS * SPLIT_TOKENS
        size = SPLIT_TOKENS
    return first, stop, origin, size


@triton.jit
def _attend(
    Q,
    NEW_KEYS,
    NEW_VALUES,
    COS,
    SIN,
    QUERY_NORM,
    KEY_NORM,
    eps,
    shift,
    KEYS,
    VALUES,
    KEY_SCALES,
    VALUE_SCALES,
    TABLE,
    SLOTS,
    POSITIONS,
    SINKS,
    OUT,
    PARTIAL_OUT,
    PARTIAL_LSE,
    ARRIVED,
    COVERED,
    PREFIX_OUT,
    PREFIX_LSE,
    scale,
    cap,
    window,
    q_row,
    q_head,
    key_page,
    key_head,
    key_token: tl.constexpr,
    value_page,
    value_head,
    value_token: tl.constexpr,
    scale_page,
    scale_head,
    table_row,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    WARPS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute one split of one row, for the GROUP query heads of one key head.

    The softmax is a running one, or one of each of WARPS warps. OUT (b, Hq, Dv); partials, if any,
    (b, Hq, num_splits, ...).
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    group = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + group
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    query = Q + row * q_row + heads[:, None] * q_head
    q_mask = (group[:, None] < GROUP) & (dims < DIM)

    # Loads that wait for no other come before the chain of slot, position, page and key.
    slot = tl.load(SLOTS + row).to(tl.int64)
    if COS is None:
        q = tl.load(query + dims, mask=q_mask, other=0.0)
    else:
        # Every query head reads the new key for itself, so that threads keep what they load.
        copies = group[:, None] * 0 if KEY_SCALES is None else tl.arange(0, 1)[:, None]
        new = row * q_row + kv_head * q_head + copies
        new_mask = (copies == 0) & (dims < DIM)
        q, q_partner = load_with_partners(query, dims, q_mask, DIM)
        k, k_partner = load_with_partners(NEW_KEYS + new, dims, new_mask, DIM)
        v = tl.load(NEW_VALUES + new + dims, mask=new_mask, other=0.0)

    covered = 0
    if COVERED is not None:
        covered = tl.load(COVERED + row)
    first, stop, origin, size = _span(
        slot, POSITIONS, covered, window, tl.num_programs(2), SPLIT_TOKENS, BLOCK_N
    )

    begin = tl.maximum(origin + split * size, first)
    end = tl.minimum(origin + (split + 1) * size, stop)
    if PARTIAL_OUT is not None and (split > 0) & (begin >= end):
        return
    pages = TABLE + slot * table_row
    keys = KEYS + kv_head * key_head
    values = VALUES + kv_head * value_head
    start = begin // BLOCK_N * BLOCK_N
    if WARPS == 1:
        looked_up = start + tl.arange(0, BLOCK_N)
    else:
        looked_up = start + warp_lookups(BLOCK_N, WARPS, PAGE_SIZE)
    page = tl.load(pages + looked_up // PAGE_SIZE, mask=looked_up < end, other=0)

    sink = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if SINKS is not None:
        # A sink is a key without a value; the row's first split counts it.
        is_counted = (group < GROUP) & (split == 0)
        sink = tl.load(SINKS + heads, mask=is_counted, other=float("-inf")) * _LOG2_E

    m = sink
    total = tl.zeros_like(sink)
    acc = tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32)
    last = end
    if COS is not None:
        position = stop - 1
        own = tl.load(pages + position // PAGE_SIZE).to(tl.int64)
        q = turned(q, q_partner, dims, q_mask, COS, SIN, position, QUERY_NORM, eps, shift, DIM)
        if end == stop:
            # The new token comes before the loop: a read from its page would have to wait for the
            # write.
            last = tl.where(begin < position, position, 0)  # a block without any key would give NaN
            k = turned(k, k_partner, dims, new_mask, COS, SIN, position, KEY_NORM, eps, shift, DIM)
            place = position % PAGE_SIZE
            key_at = keys + own * key_page + place * key_token
            value_at = values + own * value_page + place * value_token
            if KEY_SCALES is None:
                once = new_mask & (group[:, None] == 0)
                tl.store(key_at + copies + dims, k, mask=once)
                tl.store(value_at + copies + dims, v, mask=once)
            else:
                scales_at = own * scale_page + kv_head * scale_head + place
                store_eight_bits(k, key_at, KEY_SCALES + scales_at, DIM, BLOCK_DIM)
                store_eight_bits(v, value_at, VALUE_SCALES + scales_at, DIM, BLOCK_DIM)
            m, total, acc = weigh_one(q, k, v, sink, scale, cap)

    if WARPS == 1:
        key_scales = None
        value_scales = None
        if KEY_SCALES is not None:
            key_scales = KEY_SCALES + kv_head * scale_head
            value_scales = VALUE_SCALES + kv_head * scale_head
        m, total, acc = weigh_pages(
            q,
            keys,
            values,
            key_scales,
            value_scales,
            pages,
            page,
            begin,
            last,
            m,
            total,
            acc,
            scale,
            cap,
            key_page,
            key_token,
            value_page,
            value_token,
            scale_page,
            DIM,
            VALUE_DIM,
            PAGE_SIZE,
            BLOCK_N,
            BLOCK_DIM,
            BLOCK_VALUE,
        )
    else:
        m, total, acc = weigh_by_warps(
            q,
            keys,
            values,
            pages,
            page,
            begin,
            last,
            m,
            total,
            acc,
            scale,
            cap,
            key_page,
            key_token,
            value_page,
            value_token,
            DIM,
            VALUE_DIM,
            PAGE_SIZE,
            BLOCK_N,
            BLOCK_DIM,
            BLOCK_VALUE,
            GROUP,
            WARPS,
        )

    if SINKS is not None:
        total += tl.where(sink == float("-inf"), 0.0, tl.exp2(sink - m))
    real = group < GROUP
    at = row * GROUP * tl.num_programs(1) + heads
    if COVERED is not None:
        is_covered = real & (covered > 0)
        m, total, acc = with_prefix(
            m, total, acc, PREFIX_OUT, PREFIX_LSE, at, is_covered, VALUE_DIM, OVERLAPS
        )
    count = tl.cdiv(stop - origin, size)

    if PARTIAL_OUT is not None and count > 1:
        partial = at * tl.num_programs(2)
        tl.store(PARTIAL_LSE + partial + split, m + tl.log2(total), mask=real)
        store_mean(PARTIAL_OUT, partial + split, real, acc, total, VALUE_DIM)
        tl.debug_barrier()  # every thread's stores must be visible before the count
        counter = ARRIVED + row * tl.num_programs(1) + kv_head
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
        if is_last:
            tl.store(counter, 0)
            total, acc = merged(
                PARTIAL_OUT, PARTIAL_LSE, partial, real, count, VALUE_DIM, BLOCK_VALUE
            )
        real &= is_last

    store_mean(OUT, at, real, acc, total, VALUE_DIM)
