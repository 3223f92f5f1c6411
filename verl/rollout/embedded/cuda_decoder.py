"""A decode step on CUDA: where it finds what it reads, and its way through the layers of Llama-like models."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.models.attention import Facts
from verl.rollout.embedded.attention import LayerPages, Paging, PrefillStep
from verl.rollout.embedded.fused import FusedDecoder, Layer, Parts
from verl.rollout.embedded.kernels.layers import add_rms_norm, rope_store, swiglu
from verl.rollout.embedded.kernels.paged_attention import SplitWorkspace, decode_attention
from verl.rollout.embedded.kernels.slots import store_tokens
from verl.rollout.twin import ModelTwin


class Slots(NamedTuple):
    """What a step knows of each slot. The last slot is nobody's: rows that fill a batch up point to it."""

    tokens: Tensor  # (S,) int64, to be fed next
    positions: Tensor  # (S,) int32, where that token stands
    drawn: Tensor  # (S,) int32, response position of the next draw
    keys: Tensor  # (S,) int64, sampling keys
    table: Tensor  # (S, W) int32

    @classmethod
    def allocate(cls, count: int, width: int, device: torch.device) -> "Slots":
        zeros = {"device": device, "dtype": torch.int32}
        return cls(
            tokens=torch.zeros(count, device=device, dtype=torch.int64),
            positions=torch.zeros(count, **zeros),
            drawn=torch.zeros(count, **zeros),
            keys=torch.zeros(count, device=device, dtype=torch.int64),
            table=torch.zeros(count, width, **zeros),
        )


class DeviceStep(NamedTuple):
    """One new token for each of b rows, all of it on the device."""

    slots: Tensor  # (b,) int32
    state: Slots
    pages: Tensor  # (b,) int64, where the new token's key and value go
    offsets: Tensor  # (b,) int64
    num_splits: int
    split_tokens: int | None  # instead of `num_splits`
    workspace: SplitWorkspace | None

    def attend(self, paging: Paging, pages: LayerPages, q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> Tensor:
        """See `Step.attend`."""
        store_tokens(k, pages.keys, self.pages, self.offsets)
        store_tokens(v, pages.values, self.pages, self.offsets)
        return self.attend_stored(pages, q, facts)

    def attend_stored(self, pages: LayerPages, q: Tensor, facts: Facts) -> Tensor:
        """q (b, Hq, D) -> (b, Hq, Dv), over keys that include the new token's."""
        out = q.new_empty(q.shape[0], q.shape[1], pages.values.shape[3])
        decode_attention(
            q, *pages, self.state.table, self.slots, self.state.positions, out,
            scale=facts.scale, window=facts.window, cap=facts.cap,
            sinks=None if facts.sinks is None else facts.sinks.float(),
            num_splits=self.num_splits, split_tokens=self.split_tokens, workspace=self.workspace,
        )  # fmt: skip
        return out


class DevicePrefillStep(PrefillStep):
    """A prefill into pages whose layers interleave."""

    def store(self, pages: LayerPages, k: Tensor, v: Tensor) -> None:
        """See `PrefillStep.store`."""
        store_tokens(k, pages.keys, self.pages, self.offsets)
        store_tokens(v, pages.values, self.pages, self.offsets)


class TritonDecoder(FusedDecoder):
    """`FusedDecoder` by Triton kernels and stacked projections."""

    def __init__(self, twin: ModelTwin, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._projections = {
            id(layer): (
                twin.stacked([layer.attention.q_proj, layer.attention.k_proj, layer.attention.v_proj]),
                twin.stacked([layer.mlp.gate_proj, layer.mlp.up_proj]),
            )
            for layer in self.layers
        }
        self._inner_norms = {layer.post_norm for layer in self.layers}

    def add_norm(self, parts: Parts, norm: Any) -> tuple[Tensor, Parts]:
        """See `FusedDecoder.add_norm`. A layer of the trainer is compiled by itself: what it ends with is the sum of
        three, rounded once, and the last norm, outside of all, rounds as transformers does."""
        writes = norm not in self._inner_norms
        normed = add_rms_norm(
            parts, norm.weight, norm.variance_epsilon, writes_sum=writes, round_normed=norm is self.norm
        )
        return normed, parts[:1] if writes else parts

    def places(self, positions: Tensor) -> Tensor:
        """The positions themselves."""
        return positions

    def attend(self, layer: Layer, normed: Tensor, places: Any, step: Any) -> Tensor:
        """See `FusedDecoder.attend`."""
        pages = self.paging.layers[layer.attention]
        qkv = F.linear(normed, *self._projections[id(layer)][0])
        query_norm, key_norm = layer.query_norm, layer.key_norm
        q = rope_store(
            qkv, self.cos, self.sin, places, step.pages, step.offsets, *pages,
            query_norm=None if query_norm is None else query_norm.weight,
            key_norm=None if key_norm is None else key_norm.weight,
            eps=0.0 if query_norm is None else query_norm.variance_epsilon,
            keep_keys=isinstance(step, PrefillStep),
        )  # fmt: skip
        if isinstance(step, PrefillStep):
            k, v = qkv[:, q.shape[1] * q.shape[2] :].unflatten(1, (-1, q.shape[2])).chunk(2, dim=1)
            attended = self._prefill_attention(layer, q, k, v)
        else:
            attended = step.attend_stored(pages, q, layer.facts)
        output = layer.attention.o_proj
        return F.linear(attended.flatten(1), output.weight, output.bias)

    def _prefill_attention(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
        facts = layer.facts
        attend = self.paging.prefill_attention
        return attend(layer.attention, q, k, v, None, facts.scale, sliding_window=facts.window)[0][0]

    def feed_forward(self, layer: Layer, normed: Tensor) -> Tensor:
        """See `FusedDecoder.feed_forward`."""
        gate_up = F.linear(normed, *self._projections[id(layer)][1])
        return F.linear(swiglu(gate_up), layer.mlp.down_proj.weight, layer.mlp.down_proj.bias)
