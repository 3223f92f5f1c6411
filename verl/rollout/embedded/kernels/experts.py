"""Compute a mixture of experts (Shazeer et al. 2017, section 2) without the host.

A token goes to the experts that its router scores highest. Such a (token, expert) is a pair. Pairs
are sorted by expert (`kernels.routing`), an expert's pairs are cut into tiles of rows, and a
program multiplies a tile with some columns of the expert's weights. The number of tiles is bounded
by the number of tokens alone, so every call can be part of a CUDA graph.

A decode step is bound by reading the weights of the experts that its tokens chose, soon all of
them. Qwen3-30B-A3B has 128 of 9.4 MB a layer, 1.21 GB: 281 us at 4.3 TB/s, for 4 rows an expert as
for 64, whose 77 GFLOP take 98 us at 790 TFLOP/s.

Results do not depend on the order in which programs run. The tile's size depends on the number of
tokens, and sums with it: rows of another batch may be rounded differently.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.models.experts import Weights
from verl.rollout.embedded.kernels.routing import Order, sort_pairs


class Tile(NamedTuple):
    """Size and launch settings of one program: m pairs, n columns, k numbers at a time.

    With `weights_first` the weights are the left factor: a tensor core instruction of Hopper has 64
    rows, and few pairs fill its columns better.
    """

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    weights_first: bool

    def settings(self, inner: int) -> dict[str, Any]:
        """Return the keyword arguments of a kernel that adds up `inner` products."""
        return {
            "WEIGHTS_FIRST": self.weights_first,
            "EVEN_K": inner % self.k == 0,
            "BLOCK_M": self.m,
            "BLOCK_N": self.n,
            "BLOCK_K": self.k,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


def tiles_of(rows: int, top_k: int, experts: int, dtype: torch.dtype) -> tuple[Tile, Tile]:
    """Choose the tiles of the two products, by the mean number of pairs of an expert.

    On an H200, Qwen3-30B-A3B's took 225 + 126 us for 1,024 tokens, 200 + 111 for 512, 194 + 105 for
    256 and 187 + 100 for 96: 3.4 to 4.2 TB/s of weights, where a copy makes 4.26.
    """
    if dtype == torch.float32:
        small = Tile(16, 32, 32, num_warps=4, num_stages=2, weights_first=False)
        return small, small
    pairs = rows * top_k / experts
    if pairs <= 9:
        tile = Tile(16, 64, 128, num_warps=4, num_stages=3, weights_first=True)
        return tile, tile
    if pairs <= 24:
        tile = Tile(32, 64, 64, num_warps=4, num_stages=5, weights_first=True)
        return tile, tile

    if pairs <= 96:
        first = Tile(64, 64, 64, num_warps=4, num_stages=3, weights_first=True)
    else:
        first = Tile(128, 128, 64, num_warps=8, num_stages=4, weights_first=False)
    return first, Tile(first.m, 128, 64, num_warps=8, num_stages=3, weights_first=False)


def mix_experts(
    x: Tensor, ids: Tensor, scores: Tensor, weights: Weights, out: Tensor | None = None
) -> Tensor:
    """Compute score * expert(x) of every choice: out[j] (b, H) is that of each token's j-th.

    x (b, H), ids and scores (b, k). `out` (k or more, b, H) is allocated if it is not given. The
    sum over j is left to the reader (`layers.add_rms_norm`), who adds in the order of the choices.
    """
    rows, hidden = x.shape
    top_k = ids.shape[1]
    experts, columns, _ = weights.gate_up.shape
    first, second = tiles_of(rows, top_k, experts, x.dtype)
    order = sort_pairs(ids, experts, first.m)
    active = x.new_empty(ids.numel(), columns // 2)
    if out is None:
        out = x.new_empty(top_k, rows, hidden)
    run_gate_up(x, weights, order, active, top_k, first)
    run_down(active, weights, order, scores, out, second)
    return out


def run_gate_up(
    x: Tensor, weights: Weights, order: Order, active: Tensor, top_k: int, tile: Tile
) -> None:
    """Write act(gate) * up of the sorted pairs to `active` (P, I)."""
    hidden = x.shape[1]
    width = active.shape[1]
    weight = weights.gate_up
    programs = len(order.expert) * triton.cdiv(width, tile.n)
    _gate_up[(programs,)](
        x,
        weight,
        weights.gate_up_bias,
        *order,
        active,
        hidden,
        width,
        x.stride(0),
        *weight.stride(),
        weights.limit,
        weights.alpha,
        TOP_K=top_k,
        INTERLEAVED=weights.interleaved,
        **tile.settings(hidden),
    )


def run_down(
    active: Tensor, weights: Weights, order: Order, scores: Tensor, out: Tensor, tile: Tile
) -> None:
    """Multiply sorted pairs by their expert's last weights and their scores.

    `active` (P, I); the products go to the rows of their tokens in `out` (k or more, b, H).
    """
    rows, hidden = out.shape[1:]
    weight = weights.down
    inner = active.shape[1]
    programs = len(order.expert) * triton.cdiv(hidden, tile.n)
    _down[(programs,)](
        active,
        weight,
        weights.down_bias,
        *order,
        scores,
        out,
        rows,
        inner,
        hidden,
        *weight.stride(),
        TOP_K=scores.shape[1],
        **tile.settings(inner),
    )


@triton.jit
def _gate_up(
    X,
    WEIGHT,
    BIAS,
    ORDER,
    TILE_EXPERT,
    TILE_START,
    TILE_STOP,
    ACTIVE,
    inner,
    width,
    x_row,
    weight_expert,
    weight_column,
    weight_k,
    limit,
    alpha,
    TOP_K: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_n = tl.cdiv(width, BLOCK_N)
    tile = tl.program_id(0) // tiles_n
    expert = tl.load(TILE_EXPERT + tile).to(tl.int64)
    if expert < 0:
        return
    place, real, pair = _pairs_of_tile(ORDER, TILE_START, TILE_STOP, tile, BLOCK_M)
    x = X + (pair // TOP_K).to(tl.int64) * x_row
    start = tl.program_id(0) % tiles_n * BLOCK_N
    column = start + tl.arange(0, BLOCK_N)
    weight = WEIGHT + expert * weight_expert

    if INTERLEAVED:
        both = start * 2 + tl.arange(0, 2 * BLOCK_N)
        sums = _product(
            x, weight + both * weight_column, weight_k, real, both < 2 * width, inner,
            WEIGHTS_FIRST, EVEN_K, BLOCK_M, 2 * BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if BIAS is not None:
            sums += _bias(BIAS + expert * 2 * width + both, both < 2 * width)
        gate, up = tl.split(tl.reshape(sums, (BLOCK_M, BLOCK_N, 2)))
    else:
        gate, up = _products(
            x, weight + column * weight_column, weight_k, width * weight_column, real,
            column < width, inner, WEIGHTS_FIRST, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if BIAS is not None:
            bias = BIAS + expert * 2 * width + column
            gate += _bias(bias, column < width)
            up += _bias(bias + width, column < width)

    dtype = ACTIVE.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    if limit is not None:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    active = gate / (1.0 + tl.exp(-alpha * gate)) * up
    target = ACTIVE + place.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, active.to(dtype), real[:, None] & (column < width)[None, :])


@triton.jit
def _down(
    ACTIVE,
    WEIGHT,
    BIAS,
    ORDER,
    TILE_EXPERT,
    TILE_START,
    TILE_STOP,
    SCORES,
    OUT,
    rows,
    inner,
    width,
    weight_expert,
    weight_column,
    weight_k,
    TOP_K: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_n = tl.cdiv(width, BLOCK_N)
    tile = tl.program_id(0) // tiles_n
    expert = tl.load(TILE_EXPERT + tile).to(tl.int64)
    if expert < 0:
        return
    place, real, pair = _pairs_of_tile(ORDER, TILE_START, TILE_STOP, tile, BLOCK_M)
    column = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < width

    weight = WEIGHT + expert * weight_expert + column * weight_column
    sums = _product(
        ACTIVE + place.to(tl.int64) * inner, weight, weight_k, real, inside, inner,
        WEIGHTS_FIRST, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if BIAS is not None:
        sums += _bias(BIAS + expert * width + column, inside)

    dtype = OUT.dtype.element_ty
    score = tl.load(SCORES + pair, real, other=0.0)
    scaled = sums.to(dtype).to(tl.float32) * score[:, None]
    target = (pair % TOP_K).to(tl.int64) * rows + pair // TOP_K
    target = OUT + target[:, None] * width + column[None, :]
    tl.store(target, scaled.to(dtype), real[:, None] & inside[None, :])


@triton.jit
def _pairs_of_tile(ORDER, START, STOP, tile, BLOCK_M: tl.constexpr):
    """Return the places of a tile's rows among the sorted pairs, which rows are real, and pairs."""
    place = tl.load(START + tile) + tl.arange(0, BLOCK_M)
    real = place < tl.load(STOP + tile)
    return place, real, tl.load(ORDER + place, real, other=0)


@triton.jit
def _product(
    x,
    weight,
    weight_k,
    real,
    inside,
    inner,
    WEIGHTS_FIRST: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply rows x (BLOCK_M,) with columns of weights (BLOCK_N,), pointers to their first."""
    if WEIGHTS_FIRST:
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)

    for first in range(0, inner, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        left = _load(x, 1, k, real, inner, EVEN_K)
        right = _load(weight, weight_k, k, inside, inner, EVEN_K)
        sums = _dot(left, right, sums, WEIGHTS_FIRST)

    if WEIGHTS_FIRST:
        sums = tl.trans(sums)
    return sums


@triton.jit
def _products(
    x,
    weight,
    weight_k,
    distance,
    real,
    inside,
    inner,
    WEIGHTS_FIRST: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute `_product` with two groups of columns, the second `distance` behind the first."""
    if WEIGHTS_FIRST:
        gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)

    for first in range(0, inner, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        left = _load(x, 1, k, real, inner, EVEN_K)
        gate_weight = _load(weight, weight_k, k, inside, inner, EVEN_K)
        up_weight = _load(weight + distance, weight_k, k, inside, inner, EVEN_K)
        gate = _dot(left, gate_weight, gate, WEIGHTS_FIRST)
        up = _dot(left, up_weight, up, WEIGHTS_FIRST)

    if WEIGHTS_FIRST:
        gate = tl.trans(gate)
        up = tl.trans(up)
    return gate, up


@triton.jit
def _bias(columns, inside):
    return tl.load(columns, inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _load(rows, stride, k, real, inner, EVEN_K: tl.constexpr):
    mask = real[:, None]
    if not EVEN_K:
        mask = mask & (k < inner)[None, :]
    return tl.load(rows[:, None] + (k * stride)[None, :], mask, other=0.0)


@triton.jit
def _dot(left, right, sums, WEIGHTS_FIRST: tl.constexpr):
    """Add left (BLOCK_M, K) times right (BLOCK_N, K) transposed, or the transpose of that."""
    if WEIGHTS_FIRST:
        sums = tl.dot(right, tl.trans(left), sums, input_precision="ieee")
    else:
        sums = tl.dot(left, tl.trans(right), sums, input_precision="ieee")
    return sums
