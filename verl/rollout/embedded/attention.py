"""Attention over a paged key-value cache, registered with transformers as `verl_paged`.

The layers of one engine find their pages and the step they are in through the `Paging` object that
hangs on every module of that engine's model, so engines in one process never see each other's
batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from verl.models.alibi import KeyBias, set_attention
from verl.models.attention import (
    Facts,
    Layout,
    layer_facts,
    packed_attention,
    prepare,
    refuse_unsupported,
    seen_keys,
)
from verl.models.vision import language_parts
from verl.rollout.eight_bits import FP8, LARGEST
from verl.rollout.embedded import invariant
from verl.rollout.embedded.latent import LatentLayer, is_latent

IMPLEMENTATION = "verl_paged"
_PAGING = "verl_paging"
# A decode step copies its keys out of the pages for so many tokens at once: 512 MiB at 8 heads of
# 128 in bf16.
GATHER_TOKENS = 1 << 18


class LayerShape(NamedTuple):
    """The cache of one layer, and how the layer attends.

    For each token it keeps `heads` keys of `key_dim` numbers and values of `value_dim` numbers.
    """

    heads: int
    key_dim: int
    value_dim: int
    facts: Facts

    def page_parts(
        self, page_size: int, dtype: torch.dtype
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each part of a page, in the order of `LayerPages`."""
        tokens = (self.heads, page_size)
        parts = [((*tokens, self.key_dim), dtype), ((*tokens, self.value_dim), dtype)]
        if dtype in LARGEST:
            parts += 2 * [(tokens, torch.float32)]
        return parts


class LayerPages(NamedTuple):
    """Keys (num_pages, Hk, page_size, D) and values (num_pages, Hk, page_size, Dv) of one layer.

    A layer with latents (see `latent`) keeps one head: its rotary keys and its latents.
    Heads come before tokens, so that the pages of a row, gathered head by head, are one matrix a
    head. In eight bits (float8_e4m3fn), the key and the value of a token and head are multiples of
    a scale (num_pages, Hk, page_size) in fp32.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors, in which page i is row i.

        Eight bits come as bytes, because torch cannot index every dtype.
        """
        tensors = [part for part in self if part is not None]
        return [part.view(torch.uint8) if part.dtype == FP8 else part for part in tensors]


class Step(Protocol):
    """The computation of the current step on the queries, keys and values of a layer."""

    def attend(self, pages: LayerPages, q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> Tensor:
        """Store k (Hk, N, D) and v (Hk, N, Dv), then q (N, Hq, D) -> (N, Hq, Dv).

        With `facts.latent`, q is (N, Hq, D + Dv) and meets keys that values continue.
        """
        ...


class Writes:
    """The writes of a step: where the key and the value of each of its N tokens go."""

    pages: Tensor  # (N,)
    offsets: Tensor  # (N,), within these pages
    _kept: dict[Any, Tensor]

    def store(self, pages: LayerPages, k: Tensor, v: Tensor) -> None:
        """Write k (Hk, N, D) and v (Hk, N, Dv) to their pages."""
        heads = k.shape[0]
        key = ("write", heads)
        if key not in self._kept:
            # The rows (N * Hk,) of a cache viewed as (num_pages * Hk * page_size, D), by token.
            head = torch.arange(heads, device=self.pages.device)
            rows = (self.pages * heads)[:, None] + head
            self._kept[key] = (rows * pages.keys.shape[2] + self.offsets[:, None]).flatten()

        for cache, new in ((pages.keys, k), (pages.values, v)):
            by_token = new.transpose(0, 1).reshape(-1, new.shape[-1])
            cache.view(-1, cache.shape[-1]).index_copy_(0, self._kept[key], by_token)


@dataclass(frozen=True)
class PrefillStep(Writes):
    """N packed tokens of whole sequences, none of which has a page filled yet."""

    layout: Layout
    pages: Tensor  # (N,) page and offset within it that each token's key and value go to
    offsets: Tensor  # (N,)
    _kept: dict[Any, Tensor] = field(default_factory=dict)


class RowChunk(NamedTuple):
    """Rows of a decode step with keys that are gathered together, and their pages (rows, width)."""

    rows: slice
    table: Tensor


@dataclass(frozen=True)
class DecodeStep(Writes):
    """One new token for each of b rows. Keeps tensors that several layers need."""

    pages: Tensor  # (b,) where the new token's key and value go
    offsets: Tensor  # (b,)
    positions: Tensor  # (b,) position of the new token; its row's keys stand at 0..position
    longest: int  # largest position + 1, as a host number
    chunks: tuple[RowChunk, ...]
    page_size: int
    paging: "Paging"  # has the memory to gather keys into
    _kept: dict[Any, Tensor] = field(default_factory=dict)

    def attend(self, pages: LayerPages, q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> Tensor:
        """Implement `Step.attend`."""
        self.store(pages, k, v)
        parts = []
        for number, chunk in enumerate(self.chunks):
            parts.append(self._attend_chunk(number, q[chunk.rows], pages, facts))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_chunk(self, number: int, q: Tensor, pages: LayerPages, facts: Facts) -> Tensor:
        """Let each new token of a chunk attend to its pages: (rows, Hq, D) -> (rows, Hq, Dv)."""
        rows = q.shape[0]
        heads = pages.keys.shape[1]
        index = self.gather_index(number, heads)
        gathered = []

        for name, cache in (("keys", pages.keys), ("values", pages.values)):
            flat = cache.view(-1, cache.shape[2] * cache.shape[3])
            out = self.paging.workspace(name, flat, (index.shape[0], flat.shape[1]))
            torch.index_select(flat, 0, index, out=out)
            gathered.append(out.view(rows * heads, -1, cache.shape[3]))

        k, v = gathered
        return attend_keys(
            q,
            k,
            v,
            facts,
            visible=lambda: self.visible(number, facts.window),
            offset=lambda dtype: self.score_offset(number, facts, heads, dtype),
        )

    def gather_index(self, number: int, heads: int) -> Tensor:
        """Return the rows (rows, Hk, width) of a cache that make up chunk `number`.

        The cache is viewed as (num_pages * Hk, page_size * D).
        """
        key = ("gather", number, heads)
        if key not in self._kept:
            table = self.chunks[number].table
            head = torch.arange(heads, device=table.device)
            rows = (table * heads)[:, None, :] + head[None, :, None]
            self._kept[key] = rows.flatten()
        return self._kept[key]

    def visible(self, number: int, window: int | None) -> Tensor:
        """Return (rows, L) bool: the gathered positions of chunk `number` that its tokens see."""
        if window is not None and window >= self.longest:
            window = None
        key = ("visible", number, window)
        if key not in self._kept:
            rows, table = self.chunks[number]
            length = table.shape[1] * self.page_size
            self._kept[key] = seen_keys(self.positions[rows, None], length, window)
        return self._kept[key]

    def score_offset(self, number: int, facts: Facts, heads: int, dtype: torch.dtype) -> Tensor:
        """Return (rows * Hk, 1, L): 0 where `visible`, else -inf. With biases (rows * Hk, G, L)."""
        window = facts.window
        if window is not None and window >= self.longest:
            window = None
        key = ("offset", number, window, heads, dtype)
        if key not in self._kept:
            visible = self.visible(number, window)
            offset = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
            offset.masked_fill_(~visible, float("-inf"))
            if facts.bias is not None:
                position = torch.arange(visible.shape[1], device=visible.device)
                self._kept[key] = add_bias(offset, facts.bias, position[None], heads)
            else:
                self._kept[key] = offset.repeat_interleave(heads, dim=0)[:, None, :]
        return self._kept[key]


def plan_chunks(table: Tensor, widths: Sequence[int], page_size: int) -> tuple[RowChunk, ...]:
    """Cut b rows into chunks, so that gathering one does not exceed GATHER_TOKENS.

    The rows of `table` (b, W) use `widths` pages.
    """
    widest = max(widths)
    if len(widths) * widest * page_size <= GATHER_TOKENS:
        return (RowChunk(slice(0, len(widths)), table[:, :widest]),)

    chunks = []
    start = 0
    widest = 0
    for row, width in enumerate(widths):
        if row > start and (row - start + 1) * max(widest, width) * page_size > GATHER_TOKENS:
            chunks.append(RowChunk(slice(start, row), table[start:row, :widest]))
            start = row
            widest = 0
        widest = max(widest, width)
    chunks.append(RowChunk(slice(start, len(widths)), table[start:, :widest]))
    return tuple(chunks)


class Paging:
    """The pages of one engine, and the step that its model computes now."""

    def __init__(self, model: PreTrainedModel, *, invariant: bool = False) -> None:
        self.packing = prepare(model)
        self.invariant = invariant  # whether a row's bits must not depend on other rows
        self.latent_layers: dict[nn.Module, LatentLayer] = {}

        for module in model.modules():
            setattr(module, _PAGING, self)
            if is_latent(module):
                self.latent_layers[module] = LatentLayer(module, self._is_prefill)
        for part in language_parts(model):
            set_attention(part, IMPLEMENTATION)

        self.layers: dict[nn.Module, LayerPages] = {}
        # a dict while the model's layers are being counted
        self.seen: dict[nn.Module, LayerShape] | None = None
        self.step: PrefillStep | Step | None = None
        self._workspaces: dict[str, Tensor] = {}

    def _is_prefill(self) -> bool:
        return isinstance(self.step, PrefillStep)

    def workspace(self, name: str, like: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return memory to gather into, shared by all layers and steps.

        Fresh memory would cost a page fault every 4 KiB.
        """
        count = shape[0] * shape[1]
        kept = self._workspaces.get(name)
        if kept is None or kept.numel() < count or kept.dtype != like.dtype:
            kept = self._workspaces[name] = like.new_empty(count)
        return kept[:count].view(shape)

    def prefill_attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **asked: Any,
    ) -> tuple[Tensor, None]:
        """Compute `packed_attention`, sequence by sequence for an invariant engine."""
        if not self.invariant:
            return packed_attention(module, query, key, value, mask, scaling, dropout, **asked)
        refuse_unsupported(module, mask, dropout, asked)
        layout = self.packing.layout
        assert layout is not None
        q = query[0].transpose(0, 1)
        k = key[0].transpose(0, 1)
        v = value[0].transpose(0, 1)
        facts = layer_facts(module, query.shape[-1], scaling, asked)
        return invariant.prefill_attention(q, k, v, layout, facts)[None], None

    def release(self) -> None:
        """Drop the pages of all layers, and the memory they are gathered into."""
        self.layers.clear()
        self._workspaces.clear()

    @contextmanager
    def computing(self, step: PrefillStep | Step) -> Iterator[None]:
        """Let the model's layers compute `step` inside the context."""
        self.step = step
        layout = step.layout if isinstance(step, PrefillStep) else None
        try:
            with self.packing.holding(layout):
                yield
        finally:
            self.step = None

    @contextmanager
    def counting(self) -> Iterator[dict[nn.Module, LayerShape]]:
        """Record the shape of every layer's cache; a prefill inside the context writes no page."""
        self.seen = {}
        try:
            yield self.seen
        finally:
            self.seen = None


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Write this step's keys and values into their pages, then attend to all keys of the rows.

    query (1, Hq, N, D), key (1, Hk, N, D), value (1, Hk, N, Dv) -> (1, N, Hq, Dv). In a prefill the
    rows' keys are those of this step, and packed attention computes it. It also refuses arguments
    that packed attention does not support.
    """
    paging: Paging = getattr(module, _PAGING)
    step = paging.step
    assert step is not None, "the engine's module was called outside a step"
    latent = paging.latent_layers.get(module)
    if isinstance(step, PrefillStep):
        k = key[0]
        v = value[0]
        if latent is not None:
            k, v = latent.take()
        if paging.seen is not None:
            facts = layer_facts(module, query.shape[-1], scaling, asked)
            paging.seen[module] = LayerShape(k.shape[0], k.shape[2], v.shape[2], facts)
        else:
            step.store(paging.layers[module], k, v)
        return paging.prefill_attention(
            module, query, key, value, attention_mask, scaling, dropout, **asked
        )

    facts = layer_facts(module, query.shape[-1], scaling, asked)
    q = query[0].transpose(0, 1)
    if latent is not None:
        facts = facts._replace(latent=True)
        q = latent.absorb(q)
    out = step.attend(paging.layers[module], q, key[0], value[0], facts)
    if latent is not None:
        out = latent.expand_output(out)
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, paged_attention)


def add_bias(offset: Tensor, bias: KeyBias, positions: Tensor, heads: int) -> Tensor:
    """Add the bias of every query head to offset (b, L); return (b * Hk, G, L).

    The keys are at `positions` (b or 1, L).
    """
    rows, length = offset.shape
    biases = bias.at(positions).to(offset.dtype)
    biases = biases.unflatten(0, (heads, -1))
    total = offset[:, None, None] + biases.permute(2, 0, 1, 3)
    return total.reshape(rows * heads, -1, length)


def attend_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    facts: Facts,
    *,
    visible: Callable[[], Tensor],
    offset: Callable[[torch.dtype], Tensor],
) -> Tensor:
    """Attend with q (b, Hq, D) to k (b * Hk, L, D) and v (b * Hk, L, Dv); return (b, Hq, Dv).

    The mask comes in the form that is needed: `visible` (b, L) bool, or `offset` (b * Hk, 1 or G,
    L), which is 0 or a bias or -inf, in the given dtype.
    """
    rows = q.shape[0]
    heads = k.shape[0] // q.shape[0]
    # query heads that share a key head are its "sequence"
    grouped = q.reshape(rows * heads, -1, q.shape[-1])
    if facts.is_plain and q.dtype in (torch.bfloat16, torch.float16):
        if facts.latent:
            k = torch.cat([k, v], dim=-1)
        out = F.scaled_dot_product_attention(
            grouped.unflatten(0, (rows, heads)),
            k.unflatten(0, (rows, heads)),
            v.unflatten(0, (rows, heads)),
            attn_mask=visible()[:, None, None, :],
            scale=facts.scale,
        )
        return out.reshape(rows, -1, v.shape[-1])

    precise = torch.promote_types(q.dtype, torch.float32)
    grouped = grouped.to(precise)
    scores = offset(precise)
    if facts.latent:
        # The keys continue in the values: adding a second product spares a copy of both.
        assert facts.cap is None, "a capped score is no sum of two products"
        latents = v.to(precise).transpose(1, 2)
        scores = torch.baddbmm(scores, grouped[..., k.shape[-1] :], latents, alpha=facts.scale)
        grouped = grouped[..., : k.shape[-1]]

    weights = _weights(grouped, k.to(precise), scores, facts)
    out = torch.bmm(weights.to(v.dtype), v)
    return out.view(rows, -1, v.shape[-1])


def _weights(q: Tensor, k: Tensor, offset: Tensor, facts: Facts) -> Tensor:
    """Return attention probabilities (rows * Hk, G, L) in fp32, with soft cap and sinks.

    A sink is one more score of a head, which takes probability and has no value.
    """
    if facts.cap is None:
        scores = torch.baddbmm(offset, q, k.transpose(1, 2), alpha=facts.scale)
    else:
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(facts.scale / facts.cap)
        scores = scores.tanh_().mul_(facts.cap).add_(offset)

    if facts.sinks is None:
        return scores.softmax(-1)
    groups = scores.shape[1]
    sinks = facts.sinks.to(scores.dtype).view(-1, groups, 1)
    column = sinks.repeat(scores.shape[0] // sinks.shape[0], 1, 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
