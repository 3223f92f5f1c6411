"""The head of a causal LM in Triton, without storing its logits.

Every tile of the product stores only the statistics that a softmax needs. On an H200, 28,672 tokens
of hidden size 1,536 and 151,936 words take 20.7 ms with this kernel. The product by cuBLAS alone
takes 21.2 ms, and 27.3 ms if logits are written to memory and read again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from verl.models.logprobs import FUSED_WORDS
from verl.utils.arithmetic import ceil_div

# Tokens of a tile (its words are FUSED_WORDS), and the part of the hidden size of one step of the
# product. A group of neighboring tiles shares words, for as many tiles of tokens as fit into the L2
# cache.
_TOKENS = 128
_DEPTH = 64
_GROUP = 16
_COMBINED_TOKENS = 64
_COMBINED_TILES = 32
_LOG2_E = tl.constexpr(1.4426950408889634)


def can_read(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether bulk copies can read both tensors.

    They need numbers of 16 bits, in rows that begin at multiples of 16 bytes.
    """
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.bfloat16, torch.float16):
        return False
    return _is_aligned(hidden) and _is_aligned(weight)


def _is_aligned(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def head_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    slope: float,
    bound: float | None,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute `verl.models.logprobs.row_statistics` of the head's outputs.

    y = slope * linear, or y = bound * tanh(slope * linear / bound). hidden (m, H), weight (V, H),
    targets (m,) -> log sum exp y, y at the target and the entropy, (m,) each, in fp32.
    """
    tokens, size = hidden.shape
    vocabulary = weight.shape[0]
    normalizers = hidden.new_empty(tokens, dtype=torch.float32)
    chosen = torch.empty_like(normalizers)
    entropies = torch.empty_like(normalizers)
    if not tokens:
        return normalizers, chosen, entropies if entropy else None

    tiles = ceil_div(vocabulary, FUSED_WORDS)
    # For each tile: its largest y, the sum of exp(y - largest), and the sum of exp(y - largest) *
    # (y - largest).
    parts = hidden.new_empty(3 if entropy else 2, tiles, tokens, dtype=torch.float32)

    programs = 1  # on a CPU, where one interpreted program computes all tiles
    if hidden.is_cuda:
        programs = torch.cuda.get_device_properties(hidden.device).multi_processor_count
    _tiles[(programs,)](
        TensorDescriptor.from_tensor(hidden, [_TOKENS, _DEPTH]),
        TensorDescriptor.from_tensor(weight, [FUSED_WORDS, _DEPTH]),
        targets,
        parts,
        chosen,
        tokens,
        vocabulary,
        size,
        slope,
        bound,
        programs,
        ENTROPY=entropy,
        TOKENS=_TOKENS,
        WORDS=FUSED_WORDS,
        DEPTH=_DEPTH,
        GROUP=_GROUP,
        num_warps=8,
        num_stages=3,
    )

    _combine[(ceil_div(tokens, _COMBINED_TOKENS),)](
        parts,
        normalizers,
        entropies,
        tokens,
        tiles,
        ENTROPY=entropy,
        TOKENS=_COMBINED_TOKENS,
        TILES=_COMBINED_TILES,
        num_warps=4,
    )

    return normalizers, chosen, entropies if entropy else None


@triton.jit(do_not_specialize=["tokens"])
def _tiles(
    HIDDEN,
    WEIGHT,
    TARGETS,
    PARTS,
    CHOSEN,
    tokens,
    vocabulary,
    size,
    slope,
    bound,
    programs,
    ENTROPY: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute every `programs`-th tile.

    With `flatten`, the loads of a tile start while the previous tile is reduced.
    """
    row_tiles = tl.cdiv(tokens, TOKENS)
    word_tiles = tl.cdiv(vocabulary, WORDS)
    steps = tl.cdiv(size, DEPTH)
    for tile in tl.range(tl.program_id(0), row_tiles * word_tiles, programs, flatten=True):
        first = tile // (GROUP * word_tiles) * GROUP
        within = tile % (GROUP * word_tiles)
        height = min(row_tiles - first, GROUP)
        row = first + within % height
        word = within // height
        y = tl.zeros((TOKENS, WORDS), tl.float32)

        for step in range(steps):
            hidden = HIDDEN.load([row * TOKENS, step * DEPTH])
            weight = WEIGHT.load([word * WORDS, step * DEPTH])
            y = tl.dot(hidden, weight.T, y)

        y *= slope
        if bound is not None:
            # Compute tanh by an exponential that cannot overflow.
            small = tl.exp2(tl.abs(y) * (-2 * _LOG2_E) / bound)
            y = tl.where(y < 0, -bound, bound) * ((1 - small) / (1 + small))

        rows = row * TOKENS + tl.arange(0, TOKENS)
        words = word * WORDS + tl.arange(0, WORDS)
        inside = rows < tokens
        target = tl.load(TARGETS + rows, mask=inside, other=-1).to(tl.int32)
        is_here = (target >= word * WORDS) & (target < word * WORDS + WORDS)
        of_target = tl.where(words[None, :] == target[:, None], y, 0.0)
        tl.store(CHOSEN + rows, tl.sum(of_target, 1), mask=is_here)
        if word == word_tiles - 1:
            y = tl.where(words[None, :] < vocabulary, y, float("-inf"))

        largest = tl.max(y, 1)
        distance = y - largest[:, None]
        weights = tl.exp2(distance * _LOG2_E)
        place = PARTS + word.to(tl.int64) * tokens + rows
        stride = word_tiles.to(tl.int64) * tokens
        tl.store(place, largest, mask=inside)
        tl.store(place + stride, tl.sum(weights, 1), mask=inside)

        if ENTROPY:
            weighted = tl.where(weights > 0, weights * distance, 0.0)
            tl.store(place + 2 * stride, tl.sum(weighted, 1), mask=inside)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _combine(
    PARTS,
    NORMALIZERS,
    ENTROPIES,
    tokens,
    tiles,
    ENTROPY: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Compute the statistics of whole rows from those of their tiles, in the order of the tiles."""
    rows = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    stride = tiles.to(tl.int64) * tokens
    m = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    weighted = tl.zeros([TOKENS], tl.float32)

    for first in range(0, tiles, TILES):
        numbers = first + tl.arange(0, TILES)
        place = PARTS + numbers.to(tl.int64)[:, None] * tokens + rows[None, :]
        inside = (numbers < tiles)[:, None] & (rows < tokens)[None, :]
        largest = tl.load(place, mask=inside, other=float("-inf"))
        sums = tl.load(place + stride, mask=inside, other=0.0)
        new_m = tl.maximum(m, tl.max(largest, 0))
        moved = tl.where(inside, largest - new_m[None, :], 0.0)
        alpha = tl.exp2((m - new_m) * _LOG2_E)
        beta = tl.exp2(moved * _LOG2_E)
        if ENTROPY:
            # Relative to the common maximum, the sum of exp(y - new_m) * (y - new_m) of a tile is
            # beta * (own + moved * sum).
            own = tl.load(place + 2 * stride, mask=inside, other=0.0)
            before = tl.where(total > 0, alpha * (weighted + (m - new_m) * total), 0.0)
            of_tiles = tl.where(sums > 0, beta * (own + moved * sums), 0.0)
            weighted = before + tl.sum(of_tiles, 0)
        total = total * alpha + tl.sum(beta * sums, 0)
        m = new_m

    log_total = tl.log2(total) / _LOG2_E
    tl.store(NORMALIZERS + rows, m + log_total, mask=rows < tokens)
    if ENTROPY:
        tl.store(ENTROPIES + rows, log_total - weighted / total, mask=rows < tokens)
