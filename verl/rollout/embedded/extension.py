"""Prefill of sequences that have the keys of their first tokens in pages.

Each sequence gathers its keys once, for all of its new tokens together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from verl.models.attention import Facts, masked_attention, seen_keys, varlen_can
from verl.models.kernels.attention import torch_attention
from verl.models.layout import group_by_length
from verl.rollout.embedded.attention import GATHER_TOKENS, LayerPages, PrefillStep
from verl.rollout.embedded.samples import IdLists, IntArray
from verl.utils.devices import send


class PackedChunk(NamedTuple):
    """Sequences that one call of a kernel for packed sequences computes."""

    tokens: slice  # their new tokens among the packed ones
    ends: Tensor  # (s + 1,) int32, offsets of the new tokens
    key_ends: Tensor  # (s + 1,) int32, offsets of all tokens
    longest: int
    pages: Tensor  # (K,) page and offset within it of the key of each token
    offsets: Tensor  # (K,)


class PaddedChunk(NamedTuple):
    """s sequences with L new tokens and K tokens, padded on the right with their last token."""

    index: Tensor  # (s * L,) packed new tokens
    positions: Tensor  # (s, L) of these tokens
    pages: Tensor  # (s, 1, K) page and offset within it of the key of each token
    offsets: Tensor  # (s, 1, K)


@dataclass(frozen=True)
class ExtendStep:
    """N packed tokens that continue S sequences.

    Args:
        new: where the keys and values of the new tokens go.
        cached: number of tokens of each sequence that have their keys in pages already.
        table: pages (S, W) of the sequences.
        page_size: tokens of a page.
    """

    new: PrefillStep
    cached: tuple[int, ...]
    table: IntArray
    page_size: int

    @property
    def pages(self) -> Tensor:
        """Pages (N,) that the keys of the new tokens go to."""
        return self.new.pages

    @property
    def offsets(self) -> Tensor:
        """Offsets (N,) within these pages."""
        return self.new.offsets

    def attend(self, pages: LayerPages, q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> Tensor:
        """Implement `Step.attend`."""
        self.new.store(pages, k, v)
        return self.attend_stored(pages, q, facts)

    def attend_stored(
        self, pages: LayerPages, q: Tensor, facts: Facts, fresh: None = None
    ) -> Tensor:
        """Attend with q (N, Hq, D) to all keys, those of the new tokens too; return (N, Hq, Dv)."""
        assert fresh is None, "the keys of new tokens are stored before attention"
        if not facts.latent and varlen_can(q, pages.values, facts):
            return self._attend_packed(pages, q, facts)

        head = torch.arange(pages.keys.shape[1], device=q.device)[:, None]
        outputs = []
        for chunk in self._padded:
            queries = q.index_select(0, chunk.index).unflatten(0, chunk.positions.shape)
            keys = _gather(pages.keys, pages.key_scales, chunk, head, q.dtype)
            values = _gather(pages.values, pages.value_scales, chunk, head, q.dtype)
            if facts.latent:
                keys = torch.cat([keys, values], dim=-1)

            last = chunk.positions[:, None, :, None]
            seen = seen_keys(last, keys.shape[2], facts.window)
            out = masked_attention(queries.transpose(1, 2), keys, values, seen, facts)
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self._restore)

    def _attend_packed(self, pages: LayerPages, q: Tensor, facts: Facts) -> Tensor:
        value_dim = pages.values.shape[3]
        outputs = []
        for chunk in self._packed:
            place = (chunk.pages, slice(None), chunk.offsets)
            keys = _take(pages.keys, pages.key_scales, place, q.dtype)
            values = _take(pages.values, pages.value_scales, place, q.dtype)
            out = torch_attention(
                q[chunk.tokens],
                keys,
                F.pad(values, (0, q.shape[2] - value_dim)),
                (chunk.longest,),
                chunk.ends,
                facts.scale,
                window=facts.window,
                key_offsets=chunk.key_ends,
            )
            outputs.append(out[..., :value_dim])
        return torch.cat(outputs)

    @cached_property
    def _lengths(self) -> list[int]:
        """Return the tokens of each sequence, the cached and the new ones."""
        return [start + count for start, count in zip(self.cached, self.new.layout.lengths)]

    @cached_property
    def _packed(self) -> list[PackedChunk]:
        """Return chunks of consecutive sequences, each of at most GATHER_TOKENS tokens."""
        lengths = self._lengths
        starts = self.new.layout.starts
        chunks = []
        first = 0
        while first < len(lengths):
            last = first + 1
            total = lengths[first]
            while last < len(lengths) and total + lengths[last] <= GATHER_TOKENS:
                total += lengths[last]
                last += 1

            own = lengths[first:last]
            positions = np.concatenate([np.arange(length) for length in own])
            owners = np.repeat(np.arange(first, last), own)
            ends = np.array(starts[first : last + 1], np.int32) - starts[first]
            key_ends = np.array([0, *accumulate(own)], np.int32)
            chunks.append(
                PackedChunk(
                    tokens=slice(starts[first], starts[last]),
                    ends=self._send(ends),
                    key_ends=self._send(key_ends),
                    longest=max(own),
                    pages=self._send(self.table[owners, positions // self.page_size]),
                    offsets=self._send(positions % self.page_size),
                )
            )
            first = last
        return chunks

    @cached_property
    def _members(self) -> list[list[int]]:
        """Return the numbers of the sequences of each padded chunk."""
        by_context: dict[int, list[int]] = {}
        for number, start in enumerate(self.cached):
            by_context.setdefault(start.bit_length(), []).append(number)

        chunks = []
        for bits, numbers in by_context.items():
            counts = [self.new.layout.lengths[number] for number in numbers]
            for group in group_by_length(counts, 1 << bits):
                members = [numbers[place] for place in group]
                longest = max(self._lengths[number] for number in members)
                most = max(1, GATHER_TOKENS // longest)
                chunks += [members[cut : cut + most] for cut in range(0, len(members), most)]
        return chunks

    @cached_property
    def _padded(self) -> list[PaddedChunk]:
        starts = np.array(self.new.layout.starts)
        counts = np.array(self.new.layout.lengths)
        cached = np.array(self.cached)
        lengths = cached + counts

        chunks = []
        for members in self._members:
            most_new = counts[members].max()
            place = np.minimum(np.arange(most_new), counts[members, None] - 1)
            longest = lengths[members].max()
            token = np.minimum(np.arange(longest), lengths[members, None] - 1)
            owners = np.array(members)[:, None]
            chunks.append(
                PaddedChunk(
                    index=self._send((starts[owners] + place).ravel()),
                    positions=self._send(cached[owners] + place),
                    pages=self._send(self.table[owners, token // self.page_size][:, None]),
                    offsets=self._send((token % self.page_size)[:, None]),
                )
            )
        return chunks

    @cached_property
    def _restore(self) -> Tensor:
        """Return the place (N,) of each packed token in the concatenated padded chunks."""
        starts = self.new.layout.starts
        counts = self.new.layout.lengths
        restore = np.empty(starts[-1], np.int64)
        place = 0
        for members in self._members:
            length = max(counts[number] for number in members)
            for number in members:
                own = slice(starts[number], starts[number + 1])
                restore[own] = place + np.arange(counts[number])
                place += length
        return self._send(restore)

    def _send(self, array: NDArray) -> Tensor:
        return send(torch.from_numpy(array), self.new.pages.device)


def extend_step(
    new: PrefillStep, cached: Sequence[int], pages: IdLists, page_size: int
) -> ExtendStep:
    """Return the step for sequences that have their first `cached` tokens in `pages`."""
    table = np.zeros((len(pages), max(map(len, pages))), np.int64)
    for row, mine in enumerate(pages):
        table[row, : len(mine)] = mine
    return ExtendStep(new, tuple(cached), table, page_size)


def _take(cache: Tensor, scales: Tensor | None, place: Any, dtype: torch.dtype) -> Tensor:
    """Return the keys or values (..., D) at `place` in `dtype`, that of a cache without scales."""
    if scales is None:
        return cache[place]
    # as bytes: torch does not index eight-bit numbers everywhere
    taken = cache.view(torch.uint8)[place].view(cache.dtype)
    # In place, the products are fp32 and rounded once.
    return taken.to(dtype).mul_(scales[place].unsqueeze(-1))


def _gather(
    cache: Tensor, scales: Tensor | None, chunk: PaddedChunk, head: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the keys or values (s, Hk, K, D) of a chunk in `dtype`, for head (Hk, 1)."""
    if cache.is_cuda or scales is not None:  # pages of all layers interleave on CUDA
        return _take(cache, scales, (chunk.pages, head, chunk.offsets), dtype)
    # torch's CPU copies whole rows three times as fast.
    _, heads, size, dim = cache.shape
    index = (chunk.pages * heads + head) * size + chunk.offsets
    rows = cache.view(-1, dim).index_select(0, index.flatten())
    return rows.view(*index.shape, dim)
