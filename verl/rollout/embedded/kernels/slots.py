"""Read and write tokens, positions and pages of a decode step for each slot."""

import triton
import triton.language as tl
from torch import Tensor

from verl.rollout.embedded.kernels.rounding import store_row

_ROWS = 128  # rows that one program handles


def feed(
    slots: Tensor,
    tokens: Tensor,
    positions: Tensor,
    table: Tensor,
    page_size: int,
    out: tuple[Tensor, ...],
) -> None:
    """Write the inputs of a step's rows to `out`.

    Args:
        slots: (b,) int32, the slot of each row.
        tokens: (S,) int64, by slot.
        positions: (S,) int32, by slot.
        table: (S, W) int32, by slot.
        out: token ids, positions, pages and offsets, each (b,) int64.
    """
    rows = slots.shape[0]
    ids, places, pages, offsets = out

    _feed[(triton.cdiv(rows, _ROWS),)](
        slots,
        tokens,
        positions,
        table,
        table.stride(0),
        ids,
        places,
        pages,
        offsets,
        rows,
        PAGE=page_size,
        ROWS=_ROWS,
        num_warps=4,
    )


def advance(
    slots: Tensor,
    drawn_tokens: Tensor,
    tokens: Tensor,
    positions: Tensor,
    drawn: Tensor,
    *,
    by: int,
) -> None:
    """Record the tokens (b,) drawn for `slots` (b,), and advance the slots' positions by `by`.

    The last slot pads batches, so it can occur many times; it does not change.
    """
    rows = slots.shape[0]
    _advance[(triton.cdiv(rows, _ROWS),)](
        slots,
        drawn_tokens,
        tokens,
        positions,
        drawn,
        rows,
        tokens.shape[0] - 1,
        BY=by,
        ROWS=_ROWS,
        num_warps=4,
    )


def store_tokens(
    new: Tensor, cache: Tensor, pages: Tensor, offsets: Tensor, scales: Tensor | None = None
) -> None:
    """Write `new` (Hk, N, D) to the cache at pages (N,) and offsets (N,).

    The cache is (num_pages, Hk, page_size, D). In eight bits it has `scales` (num_pages, Hk,
    page_size).
    """
    heads, count, width = new.shape
    assert new.stride(2) == cache.stride(3) == 1, "last dimensions must be contiguous"
    assert scales is None or scales.stride(2) == 1, "last dimensions must be contiguous"
    scale_strides = (None, None) if scales is None else scales.stride()[:2]

    _store_tokens[(count, heads)](
        new,
        new.stride(0),
        new.stride(1),
        cache,
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        scales,
        *scale_strides,
        pages,
        offsets,
        width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )


@triton.jit
def _feed(
    SLOTS,
    TOKENS,
    POSITIONS,
    TABLE,
    table_row,
    IDS,
    PLACES,
    PAGES,
    OFFSETS,
    count,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    slot = tl.load(SLOTS + row, mask=inside, other=0).to(tl.int64)
    position = tl.load(POSITIONS + slot, mask=inside, other=0)

    tl.store(IDS + row, tl.load(TOKENS + slot, mask=inside, other=0), mask=inside)
    tl.store(PLACES + row, position.to(tl.int64), mask=inside)
    page = tl.load(TABLE + slot * table_row + position // PAGE, mask=inside, other=0)
    tl.store(PAGES + row, page.to(tl.int64), mask=inside)
    tl.store(OFFSETS + row, (position % PAGE).to(tl.int64), mask=inside)


@triton.jit
def _advance(
    SLOTS, NEW, TOKENS, POSITIONS, DRAWN, count, idle, BY: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(SLOTS + row, mask=row < count, other=0)
    live = (row < count) & (slot != idle)
    tl.store(TOKENS + slot, tl.load(NEW + row, mask=live, other=0), mask=live)
    tl.store(POSITIONS + slot, tl.load(POSITIONS + slot, mask=live, other=0) + BY, mask=live)
    tl.store(DRAWN + slot, tl.load(DRAWN + slot, mask=live, other=0) + 1, mask=live)


@triton.jit
def _store_tokens(
    NEW,
    new_head,
    new_token,
    CACHE,
    cache_page,
    cache_head,
    cache_token,
    SCALES,
    scale_page,
    scale_head,
    PAGES,
    OFFSETS,
    width,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    page = tl.load(PAGES + token)
    offset = tl.load(OFFSETS + token)

    value = tl.load(NEW + head * new_head + token * new_token + column, mask=inside)
    target = CACHE + page * cache_page + head * cache_head + offset * cache_token + column
    if SCALES is None:
        tl.store(target, value, mask=inside)
    else:
        wide = tl.where(inside, value.to(tl.float32), 0.0)
        store_row(wide, target, SCALES + page * scale_page + head * scale_head + offset, inside)
