"""Choose the experts of tokens, and sort the (token, expert) pairs by expert, without the host."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.models.experts import Routing

# Pairs that a program of the sort reads at a time.
_SORTED = 4096
_LISTED = tl.constexpr(64)  # tiles that it writes at a time


class Order(NamedTuple):
    """P pairs sorted by expert, and the tiles of at most m that they are cut into.

    A tile has the sorted pairs from `start` to `stop`, all of `expert`, which is -1 for no tile.
    """

    pairs: Tensor  # (P,) int32: token * k + number of the choice
    expert: Tensor  # (T,) int32
    start: Tensor  # (T,) int32
    stop: Tensor  # (T,) int32


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Choose experts by logits (b, E): ids (b, k) int32 and scores (b, k) fp32.

    Of equal logits the first counts as larger.
    """
    rows, experts = logits.shape
    ids = torch.empty(rows, routing.top_k, dtype=torch.int32, device=logits.device)
    scores = torch.empty(rows, routing.top_k, dtype=torch.float32, device=logits.device)
    _route[(rows,)](
        logits,
        ids,
        scores,
        experts,
        OF_CHOSEN=routing.of_chosen,
        NORMALIZED=routing.normalized,
        ROUNDED=routing.rounded,
        TOP_K=routing.top_k,
        SLOTS=triton.next_power_of_2(routing.top_k),
        BLOCK=triton.next_power_of_2(experts),
        num_warps=1,
    )
    return ids, scores


def sort_pairs(ids: Tensor, experts: int, tile_m: int) -> Order:
    """Sort the pairs of `ids` (b, k) by expert, equal ones by token."""
    pairs = ids.numel()
    most = (pairs + min(pairs, experts) * (tile_m - 1)) // tile_m
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(3, most, dtype=torch.int32, device=ids.device)
    block = min(_SORTED, triton.next_power_of_2(pairs))
    _sort_pairs[(experts,)](
        ids,
        order,
        *tiles,
        pairs,
        most,
        BINS=triton.next_power_of_2(experts),
        BLOCK=block,
        TILE_M=tile_m,
        num_warps=8,
    )
    return Order(order, *tiles)


@triton.jit
def _route(
    LOGITS,
    IDS,
    SCORES,
    experts,
    OF_CHOSEN: tl.constexpr,
    NORMALIZED: tl.constexpr,
    ROUNDED: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    real = expert < experts
    logits = tl.load(LOGITS + row * experts + expert, real, other=float("-inf")).to(tl.float32)
    weights = tl.exp(logits - tl.max(logits, axis=0))

    slot = tl.arange(0, SLOTS)
    ids = tl.zeros((SLOTS,), tl.int32)
    scores = tl.zeros((SLOTS,), tl.float32)
    remaining = logits
    for number in tl.static_range(TOP_K):
        best = tl.argmax(remaining, axis=0)
        is_best = expert == best
        ids = tl.where(slot == number, best, ids)
        scores = tl.where(slot == number, tl.sum(tl.where(is_best, weights, 0.0)), scores)
        remaining = tl.where(is_best, float("-inf"), remaining)

    if OF_CHOSEN or NORMALIZED:
        scores = scores / tl.sum(scores)
    else:
        scores = scores / tl.sum(weights)
    if ROUNDED:
        scores = scores.to(LOGITS.dtype.element_ty).to(tl.float32)
    inside = slot < TOP_K
    tl.store(IDS + row * TOP_K + slot, ids, inside)
    tl.store(SCORES + row * TOP_K + slot, scores, inside)


@triton.jit
def _sort_pairs(
    IDS,
    ORDER,
    TILE_EXPERT,
    TILE_START,
    TILE_STOP,
    pairs,
    most,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """Write the sorted pairs and the tiles of one expert."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        ids = tl.load(IDS + at, at < pairs, other=0)
        counts += tl.histogram(ids, BINS, mask=at < pairs)
    tiles = (counts + (TILE_M - 1)) // TILE_M
    start = tl.sum(tl.where(bins < expert, counts, 0))
    count = tl.sum(tl.where(bins == expert, counts, 0))
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0))
    stop = start + count

    place = start
    for first in range(0, pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mine = (tl.load(IDS + at, at < pairs, other=-1) == expert).to(tl.int32)
        tl.store(ORDER + place + tl.cumsum(mine) - 1, at, mine > 0)
        place += tl.sum(mine)

    own = (count + (TILE_M - 1)) // TILE_M
    for first in range(0, own, _LISTED):
        number = first + tl.arange(0, _LISTED)
        inside = number < own
        tl.store(TILE_EXPERT + first_tile + number, expert, inside)
        tl.store(TILE_START + first_tile + number, start + number * TILE_M, inside)
        tl.store(TILE_STOP + first_tile + number, stop, inside)
    if expert == 0:
        for first in range(tl.sum(tiles), most, _LISTED):
            number = first + tl.arange(0, _LISTED)
            tl.store(TILE_EXPERT + number, -1, number < most)
