"""Decoders of a CPU: plain operations of torch, and stacked weights for small models."""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from verl.rollout.embedded.attention import PrefillStep, Step
from verl.rollout.embedded.fused import FusedDecoder, Layer, Parts
from verl.rollout.embedded.scheduler import STEPS_AT_ONCE


def _added_up(parts: Parts) -> Tensor:
    """Return the sum of `parts`, written to the first."""
    residual, *others = parts
    for other in others:
        residual += other
    return residual


class TorchDecoder(FusedDecoder):
    """`FusedDecoder` by plain operations of torch, which round where transformers rounds.

    In bf16 a log-prob is nearer to the trainer's by a seventh.
    """

    prefills = False

    def add_norm(self, parts: Parts, norm: Any, inner: Any) -> tuple[Tensor, Parts]:
        """Implement `FusedDecoder.add_norm`."""
        residual = _added_up(parts)
        return self._norm(residual, norm), (residual,)

    def places(self, positions: Tensor) -> Any:
        """Return cos and sin (b, 1, D)."""
        return self.cos[positions][:, None], self.sin[positions][:, None]

    def attend(self, layer: Layer, normed: Tensor, places: Any, step: Step) -> Tensor:
        """Implement `FusedDecoder.attend`."""
        attention = layer.attention
        size = (normed.shape[0], -1, self.cos.shape[1])
        q, k, v = (
            F.linear(normed, linear.weight, linear.bias).view(size)
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if layer.query_norm is not None:
            q = self._norm(q, layer.query_norm)
            k = self._norm(k, layer.key_norm)
        q = _rotate(q, *places)
        k = _rotate(k, *places)
        pages = self.paging.layers[attention]
        out = step.attend(pages, q, k.transpose(0, 1), v.transpose(0, 1), layer.facts)
        return F.linear(out.flatten(1), attention.o_proj.weight, attention.o_proj.bias)

    def feed_forward(self, layer: Layer, normed: Tensor) -> Tensor:
        """Implement `FusedDecoder.feed_forward`."""
        gate = layer.mlp.gate_proj
        up = layer.mlp.up_proj
        down = layer.mlp.down_proj
        active = F.silu(F.linear(normed, gate.weight, gate.bias), inplace=True)
        active.mul_(F.linear(normed, up.weight, up.bias))
        return F.linear(active, down.weight, down.bias)

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, norm.variance_epsilon).mul_(norm.weight)


class StackedDecoder(FusedDecoder):
    """`FusedDecoder` for small models on CPU, where calls cost as much as arithmetic.

    Weights that read one input are one matrix, multiplied by the factors of the norm before it. The
    two numbers of a head that rotate together are adjacent, as one complex number; scores do not
    depend on the order. These matrices are copies: call `refresh` after every change of the
    weights.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        half = self.sin.shape[1] // 2
        turns = torch.complex(self.cos[:, :half], self.sin[:, :half])
        # Samples at their last position may be computed on with for some steps: any turn will do.
        turns = torch.cat([turns, turns[-1:].expand(STEPS_AT_ONCE, -1)])
        self.turns = turns[:, None]  # (P, 1, D / 2)
        self.stacks: Any = None  # `Stacks` of all layers
        self._layer_stacks: dict[int, Stacks] = {}  # views of them, by id of the layer
        self.refresh()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the copies."""
        tensors = filter(torch.is_tensor, tree_leaves(self.stacks))
        return sum(tensor.nbytes for tensor in tensors)

    @torch.inference_mode()
    def refresh(self) -> None:
        """Copy the current weights."""
        # The old copies go first: the new ones may take their memory.
        self.stacks = None
        self._layer_stacks = {}
        self.stacks = _stacked([Stacks.of(layer) for layer in self.layers])
        for number, layer in enumerate(self.layers):
            # views of the layer's own part
            part = tree_map_only(Tensor, operator.itemgetter(number), self.stacks)
            self._layer_stacks[id(layer)] = part
        self.last_factors = self.norm.weight * self.norm.weight.shape[0] ** 0.5

    def add_norm(self, parts: Parts, norm: Any, inner: Any) -> tuple[Tensor, Parts]:
        """Implement `FusedDecoder.add_norm` without factors, which the next matrix has.

        The last norm applies its own.
        """
        residual = _added_up(parts)
        unit = _unit_rows(residual, norm.variance_epsilon)
        if norm is self.norm:
            unit = unit.mul_(self.last_factors)
        return unit, (residual,)

    def places(self, positions: Tensor) -> Any:
        """Return rotary factors (b, 1, D / 2), complex."""
        return self.turns.index_select(0, positions)

    def attend(self, layer: Layer, normed: Tensor, places: Any, step: PrefillStep | Step) -> Tensor:
        """Implement `FusedDecoder.attend`."""
        stacks = self._layer_stacks[id(layer)]
        dim = self.cos.shape[1]
        heads = _product(normed, stacks.qkv).view(normed.shape[0], -1, dim)
        rotated, v = heads.tensor_split((-stacks.num_key_heads,), dim=1)
        if stacks.head_norm is not None:
            rotated = _unit_rows(rotated, layer.query_norm.variance_epsilon).mul_(stacks.head_norm)
        rotated.view(places.dtype).mul_(places)
        q, k = rotated.tensor_split((-stacks.num_key_heads,), dim=1)

        k = k.transpose(0, 1)
        v = v.transpose(0, 1)
        pages = self.paging.layers[layer.attention]
        facts = layer.facts

        if isinstance(step, PrefillStep):
            step.store(pages, k, v)
            heads = (q.transpose(0, 1)[None], k[None], v[None])
            out = self.paging.prefill_attention(
                layer.attention, *heads, None, facts.scale, sliding_window=facts.window
            )
            out = out[0][0]
        else:
            out = step.attend(pages, q, k, v, facts)

        return _product(out.flatten(1), stacks.output)

    def feed_forward(self, layer: Layer, normed: Tensor) -> Tensor:
        """Implement `FusedDecoder.feed_forward`."""
        stacks = self._layer_stacks[id(layer)]
        gate, up = _products(normed, stacks.gate_up)
        return _product(F.silu(gate, inplace=True).mul_(up), stacks.down)


class Matrix(NamedTuple):
    weight: Tensor  # (K, N), as products read it fastest, or n of them (n, K, N)
    bias: Tensor | None  # (1, N), or (n, 1, N)


class Stacks(NamedTuple):
    """The matrices of one layer, or of n, one behind the other."""

    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix
    head_norm: Tensor | None  # (Hq + Hk, D), factors of the norms of query and key heads
    num_key_heads: int

    @classmethod
    def of(cls, layer: Layer) -> "Stacks":
        attention = layer.attention
        mlp = layer.mlp
        dim = attention.head_dim
        num_query_heads = attention.q_proj.weight.shape[0] // dim
        num_key_heads = attention.k_proj.weight.shape[0] // dim
        qkv = _stack([attention.q_proj, attention.k_proj, attention.v_proj], layer.input_norm)
        rotated = slice((num_query_heads + num_key_heads) * dim)

        for tensor in qkv:
            if tensor is not None:
                tensor[..., rotated] = _paired(
                    tensor[..., rotated].unflatten(-1, (-1, dim))
                ).flatten(-2)

        head_norm = None
        if layer.query_norm is not None:
            query = layer.query_norm.weight
            key = layer.key_norm.weight
            factors = torch.cat(
                [query.expand(num_query_heads, dim), key.expand(num_key_heads, dim)]
            )
            head_norm = _paired(factors * dim**0.5)

        gate = _stack([mlp.gate_proj], layer.post_norm)
        up = _stack([mlp.up_proj], layer.post_norm)
        return cls(
            qkv=qkv,
            output=_stack([attention.o_proj]),
            gate_up=_stacked([gate, up]),
            down=_stack([mlp.down_proj]),
            head_norm=head_norm,
            num_key_heads=num_key_heads,
        )


def _stack(linears: Sequence[nn.Linear], norm: Any = None) -> Matrix:
    """Return one matrix for all weights, to follow `_unit_rows` where a norm is given."""
    weight = torch.cat(tuple(linear.weight for linear in linears))
    if norm is not None:
        weight *= norm.weight * weight.shape[1] ** 0.5
    biases = tuple(linear.bias for linear in linears if linear.bias is not None)
    assert len(biases) in (0, len(linears))
    bias = torch.cat(biases)[None] if biases else None
    return Matrix(weight.t().contiguous(), bias)


def _stacked(parts: Sequence[Any]) -> Any:
    """Stack n equal tuples: each tensor becomes (n, ...)."""
    return tree_map(_stack_tensors, *parts)


def _stack_tensors(first: Any, *others: Any) -> Any:
    return torch.stack([first, *others]) if isinstance(first, Tensor) else first


def _paired(heads: Tensor) -> Tensor:
    """Interleave the halves of heads (..., D): each number precedes that half of D behind it."""
    return torch.stack(heads.chunk(2, dim=-1), dim=-1).flatten(-2)


def _product(x: Tensor, matrix: Matrix) -> Tensor:
    """Return x (b, K) times a matrix, (b, N)."""
    weight, bias = matrix
    if bias is None:
        return torch.mm(x, weight)
    return torch.addmm(bias, x, weight)


def _products(x: Tensor, matrices: Matrix) -> Tensor:
    """Return x (b, K) times each of n matrices, (n, b, N).

    MKL computes this faster than one product of n * N columns.
    """
    weight, bias = matrices
    each = x.expand(weight.shape[0], -1, -1)
    if bias is None:
        return torch.bmm(each, weight)
    return torch.baddbmm(bias, each, weight)


def _unit_rows(x: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm of x (..., D) without its factors, divided by the root of D."""
    # The root of (sum of squares + D * epsilon), in one operation less.
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(
        _constant((epsilon * x.shape[-1]) ** 0.5)
    )


@functools.cache
def _constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads (b, h, D); cos and sin (b, 1, D) hold each angle twice, half of D apart."""
    half = heads.shape[-1] // 2
    low = heads[..., :half]
    high = heads[..., half:]
    out = heads * cos
    out[..., :half].sub_(high * sin[..., :half])
    out[..., half:].add_(low * sin[..., half:])
    return out
