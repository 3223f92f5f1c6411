"""A decode step on CUDA: its inputs, and its computation for Llama-like models."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.models.attention import Facts
from verl.models.experts import Mixture
from verl.models.kernels import swiglu as fused_swiglu
from verl.rollout.eight_bits import (
    DTYPES,
    Rows,
    Unscaled,
    product,
    quantize,
    rotates,
    unscaled_product,
)
from verl.rollout.embedded.attention import LayerPages, PrefillStep
from verl.rollout.embedded.fused import GEMMA_FAMILIES, FusedDecoder, Layer, Parts
from verl.rollout.embedded.kernels import PROCESSORS, narrow_swiglu
from verl.rollout.embedded.kernels.decode_launch import SplitWorkspace
from verl.rollout.embedded.kernels.experts import mix_experts
from verl.rollout.embedded.kernels.layers import add_rms_norm, swiglu
from verl.rollout.embedded.kernels.paged_attention import Fresh, decode_attention
from verl.rollout.embedded.kernels.rope_store import rope_store
from verl.rollout.embedded.kernels.routing import route
from verl.rollout.embedded.kernels.shared_prefix import SharedPrefixes, can_share
from verl.rollout.embedded.kernels.slots import store_tokens
from verl.rollout.embedded.tensor_parallel import TensorParallel
from verl.rollout.twin import ModelTwin
from verl.utils.arithmetic import ceil_div

# A product is cut along K where its output has fewer tiles (of _TILE rows and columns) than a
# device has multiprocessors. The parts have at least _SHORTEST numbers.
_TILE = 128
_MOST_SPLITS = 4
_SHORTEST = 1024
# From so many rows on, quack-kernels are faster than a product and a SwiGLU, if they are installed.
# Norm, gate, up and down of 1.5B take 64 us with them for 512 rows, and 75 in separate kernels. Of
# 7B, which is _WIDE, they take 321 us and 296, and with 1,024 rows 614 and 648.
_FUSED_ROWS = 512
_FUSED_ROWS_OF_WIDE = 1024
_WIDE = 2048


class Slots(NamedTuple):
    """The state of each slot. The last slot belongs to no sample; rows that pad a batch use it."""

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
    """One new token for each of b rows, with all inputs on the device."""

    slots: Tensor  # (b,) int32
    state: Slots
    pages: Tensor  # (b,) int64, where the new token's key and value go
    offsets: Tensor  # (b,) int64
    num_splits: int
    split_tokens: int | None  # instead of `num_splits`
    workspace: SplitWorkspace | None
    takes_fresh: bool  # attention rotates and stores the new tokens
    prefixes: SharedPrefixes | None = None  # blocks of rows whose shared pages are read once

    def attend(self, pages: LayerPages, q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> Tensor:
        """Implement `Step.attend`."""
        _store(pages, k, v, self.pages, self.offsets)
        return self.attend_stored(pages, q, facts)

    def attend_stored(
        self, pages: LayerPages, q: Tensor, facts: Facts, fresh: Fresh | None = None
    ) -> Tensor:
        """Attend with q (b, Hq, D) to all keys; return (b, Hq, Dv).

        The keys include that of the new token, which `fresh` stores if it is given.
        """
        out = q.new_empty(q.shape[0], q.shape[1], pages.values.shape[3])
        decode_attention(
            q,
            pages.keys,
            pages.values,
            self.state.table,
            self.slots,
            self.state.positions,
            out,
            key_scales=pages.key_scales,
            value_scales=pages.value_scales,
            scale=facts.scale,
            window=facts.window,
            cap=facts.cap,
            sinks=None if facts.sinks is None else facts.sinks.float(),
            num_splits=self.num_splits,
            split_tokens=self.split_tokens,
            workspace=self.workspace,
            fresh=fresh,
            prefixes=self._prefixes_of(pages, q, facts),
        )

        return out

    def _prefixes_of(self, pages: LayerPages, q: Tensor, facts: Facts) -> SharedPrefixes | None:
        """Return the blocks of rows, if this layer can read their shared pages once."""
        if self.prefixes is None or facts.window is not None:
            return None
        group = q.shape[1] // pages.keys.shape[1]
        widest = max(pages.keys.shape[3], pages.values.shape[3])
        return self.prefixes if can_share(group, widest, q.dtype, q.device) else None


class DevicePrefillStep(PrefillStep):
    """A prefill into pages in which layers interleave."""

    def store(self, pages: LayerPages, k: Tensor, v: Tensor) -> None:
        """Implement `Writes.store`."""
        _store(pages, k, v, self.pages, self.offsets)


def _store(pages: LayerPages, k: Tensor, v: Tensor, numbers: Tensor, offsets: Tensor) -> None:
    """Write k (Hk, N, D) and v (Hk, N, Dv) to the pages of these numbers (N,) at offsets (N,)."""
    store_tokens(k, pages.keys, numbers, offsets, pages.key_scales)
    store_tokens(v, pages.values, numbers, offsets, pages.value_scales)


class Projections(NamedTuple):
    """The stacked weights and biases of a layer: Q, K and V in one, and gate and up in one."""

    qkv: tuple[Any, Tensor | None]
    gate_up: tuple[Any, Tensor | None] | None  # None: all experts are routed ones


class TritonDecoder(FusedDecoder):
    """`FusedDecoder` by Triton kernels and stacked projections.

    Where the twin's linear layers are in eight bits, norms and activations give rows in eight bits
    to the products that follow.
    """

    def __init__(
        self,
        twin: ModelTwin,
        *arguments: Any,
        parallel: TensorParallel | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, parallel=parallel, **settings)
        # whether the bits of a row may depend on the rest of the batch
        self._may_vary = not self.paging.invariant and twin.dtype != torch.float32
        # Sums over ranks take whole products, and where K is cut depends on the number of rows.
        self._may_split = parallel is None and self._may_vary
        self._dtype = twin.dtype
        # the dtype of rows in eight bits; None: all rows are in `_dtype`
        self._small = None if twin.quantization is None else DTYPES[twin.quantization]
        self._rotates = self._small is not None and rotates(self._small)
        self._one = torch.ones((), device=self.norm.weight.device)

        self._projections: dict[int, Projections] = {}  # by id of the layer
        for layer in self.layers:
            attention = layer.attention
            qkv = twin.stacked([attention.q_proj, attention.k_proj, attention.v_proj])
            mlp = layer.mlp if layer.mixture is None else layer.mixture.shared
            gate_up = None if mlp is None else twin.stacked([mlp.gate_proj, mlp.up_proj])
            self._projections[id(layer)] = Projections(qkv, gate_up)

        self._post_norms = {layer.post_norm for layer in self.layers}
        self._is_gemma = self.family in GEMMA_FAMILIES
        self._epsilon: float = self.norm.eps if self._is_gemma else self.norm.variance_epsilon
        self._shift = 1.0 if self._is_gemma else 0.0  # factors of a norm are 1 + weight
        # transformers rounds before it multiplies by the factors
        self._rounds_last = not self._is_gemma and self.family != "gpt_oss"

    def add_norm(self, parts: Parts, norm: Any, inner: Any) -> tuple[Any, Parts]:
        """Implement `FusedDecoder.add_norm`.

        Rounding follows the trainer, which compiles each layer by itself: a layer ends with a sum
        of three that is rounded once, and the last norm, outside of the layers, rounds as
        transformers does.
        """
        writes_sum = norm not in self._post_norms or inner is not None
        rows = None  # in eight bits, for the linear layer that follows
        if self._small is not None and norm is not self.norm:
            rows = Rows.empty(parts[0].shape, self._small, parts[0].device)

        normed = add_rms_norm(
            parts,
            norm.weight,
            self._epsilon,
            writes_sum=writes_sum,
            round_normed=self._rounds_last and norm is self.norm,
            shift=self._shift,
            inner=None if inner is None else inner.weight,
            rows=rows,
            rotated=rows is not None and self._rotates,
            may_vary=self._may_vary,
        )
        if writes_sum:
            parts = parts[:1]
        return (normed if rows is None else rows), parts

    def places(self, positions: Tensor) -> Tensor:
        """Return the positions themselves."""
        return positions

    def attend(self, layer: Layer, normed: Any, places: Any, step: Any) -> Tensor | Unscaled:
        """Implement `FusedDecoder.attend`."""
        pages = self.paging.layers[layer.attention]
        qkv = self._product(normed, *self._projections[id(layer)].qkv)
        num_keys = pages.keys.shape[1]
        dim = pages.keys.shape[3]
        q, k, v = qkv.unflatten(1, (-1, dim)).tensor_split((-2 * num_keys, -num_keys), dim=1)
        norms: dict[str, Any] = {
            "query_norm": None if layer.query_norm is None else layer.query_norm.weight,
            "key_norm": None if layer.key_norm is None else layer.key_norm.weight,
            "eps": self._epsilon,
            "shift": self._shift,
        }

        fresh = None
        if isinstance(step, DeviceStep) and step.takes_fresh:
            fresh = Fresh(k, v, *layer.rotary, **norms)
        else:
            rope_store(
                qkv,
                *layer.rotary,
                places,
                step.pages,
                step.offsets,
                pages.keys,
                pages.values,
                key_scales=pages.key_scales,
                value_scales=pages.value_scales,
                **norms,
            )

        if isinstance(step, PrefillStep):
            attended = self._prefill_attention(layer, q, k, v)
        else:
            attended = step.attend_stored(pages, q, layer.facts, fresh)
        attended = attended.flatten(1)
        if self._small is not None:
            attended = quantize(attended, dtype=self._small, rotated=self._rotates)
        return self._output_projection(attended, layer.attention.o_proj)

    def _prefill_attention(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.transpose(0, 1)[None]
        k = k.transpose(0, 1)[None]
        v = v.transpose(0, 1)[None]
        facts = layer.facts
        attend = self.paging.prefill_attention
        out, _ = attend(
            layer.attention,
            q,
            k,
            v,
            None,
            facts.scale,
            sliding_window=facts.window,
            softcap=facts.cap,
            s_aux=facts.sinks,
        )
        return out[0]

    def feed_forward(self, layer: Layer, normed: Any) -> Tensor | Unscaled:
        """Implement `FusedDecoder.feed_forward`."""
        if layer.mixture is not None:
            return self._mix(layer, layer.mixture, normed)
        projection = self._projections[id(layer)].gate_up
        assert projection is not None, "a layer without experts has an MLP"
        down = layer.mlp.down_proj
        if self._small is None:
            return self._output_projection(self._gated_product(normed, *projection), down)

        gate_up = self._product(normed, *projection)
        half = (gate_up.shape[0], gate_up.shape[1] // 2)
        rows = Rows.empty(half, self._small, gate_up.device)
        swiglu(gate_up, gelu=self._is_gemma, rows=rows, rotated=self._rotates)
        return self._output_projection(rows, down)

    def _product(self, x: Any, weight: Any, bias: Tensor | None) -> Tensor:
        """Return x W^T + b of tensors, or of rows in eight bits."""
        if isinstance(x, Rows):
            return product(x, weight, bias, self._dtype)
        return F.linear(x, weight, bias)

    def _gated_product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return silu(gate) * up (b, I), or Gemma's, in one kernel where that is faster."""
        rows, hidden = x.shape
        if self._may_vary and bias is None:
            if narrow_swiglu.can_gate(rows, hidden, x.device):
                return narrow_swiglu.gated_product(x, weight, gelu=self._is_gemma)

            fewest = _FUSED_ROWS if hidden < _WIDE else _FUSED_ROWS_OF_WIDE
            size = (hidden, weight.shape[0] // 2)
            if rows >= fewest and not self._is_gemma and fused_swiglu.is_usable(x.device, *size):
                return fused_swiglu.gated_product(x, weight)

        return swiglu(F.linear(x, weight, bias), gelu=self._is_gemma)

    def _mix(self, layer: Layer, mixture: Mixture, normed: Tensor) -> Tensor:
        """Return the outputs (S, b, H) of the chosen experts and of a shared one."""
        router = mixture.router
        logits = F.linear(normed, router.weight, getattr(router, "bias", None))
        ids, scores = route(logits, mixture.routing)
        recorded = self.paging.packing.recorded
        if recorded is not None:
            recorded[len(recorded)] = ids

        projection = self._projections[id(layer)].gate_up  # of the shared expert
        count = mixture.routing.top_k + int(projection is not None)
        out = normed.new_empty(count, *normed.shape)
        mix_experts(normed, ids, scores, mixture.weights, out)
        if projection is not None:
            active = self._gated_product(normed, *projection)
            shared = F.linear(active, mixture.shared.down_proj.weight)
            share = F.linear(normed, mixture.shared_gate.weight).sigmoid_()
            torch.mul(shared, share, out=out[-1])
        return out

    def _output_projection(self, x: Tensor | Rows, linear: Any) -> Tensor | Unscaled:
        """Return x W^T + b (b, N), or the products (S, b, N) of S parts of x and W in fp32.

        `add_norm` sums the parts. Rows in FP8 give a product with separate scales, which `add_norm`
        multiplies.
        """
        if isinstance(x, Rows):
            if linear.bias is not None:
                return product(x, linear.rows, linear.bias, self._dtype)
            if self._small == torch.int8:
                return product(x, linear.rows, None, self._dtype, may_split=self._may_split)
            return unscaled_product(x, linear.rows, self._one, self._dtype)

        splits = 1
        if self._may_split and linear.bias is None:
            splits = _choose_splits(x.shape[0], *linear.weight.shape)
        if splits == 1:
            return F.linear(x, linear.weight, linear.bias)
        parts = x.unflatten(1, (splits, -1)).transpose(0, 1)
        weights = linear.weight.unflatten(1, (splits, -1)).transpose(0, 1)
        return torch.bmm(parts, weights.transpose(1, 2), out_dtype=torch.float32)


def _choose_splits(rows: int, columns: int, inner: int) -> int:
    """Return the number of parts that the K = `inner` of a product (M, K) x (K, N) is cut into.

    An output of few tiles keeps few multiprocessors busy. cuBLAS cuts K, too, but sums in a
    separate kernel. On an H200 with 256 rows, the last product of a layer took 10.4 us at 0.5B,
    19.2 at 1.5B and 58.4 at 7B with cuBLAS. In parts it takes 7.3, 14.0 and 53.7, and the norm,
    which sums them, takes 0.6 to 1 us more.
    """
    tiles = ceil_div(rows, _TILE) * ceil_div(columns, _TILE)
    splits = _MOST_SPLITS
    # Rows of 16-bit numbers must begin at multiples of 16 bytes.
    while splits > 1 and (
        inner < splits * _SHORTEST or inner % (8 * splits) or tiles * splits > PROCESSORS
    ):
        splits //= 2
    return splits
