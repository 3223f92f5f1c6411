"""What an engine holds, in bytes, told from shapes alone: its model may lie on the meta device.

The terms are those of a layer like Llama's (norm, attention with rotary positions, norm, gated
MLP). Of another family (`ModelShape.is_llama_like` is False) they are a bound by analogy: a plain
MLP is counted as a gated one of its width, experts as those that a token visits. A phase is what it
holds beside the resident bytes at the worst moment.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from verl.config import FSDPConfig, OptimConfig
from verl.distributed.fsdp import GATHERED_SHARE
from verl.distributed.offload import CHUNK_BYTES
from verl.engine.model_shape import ModelShape, Weight
from verl.models.divergence import CHUNK_TENSORS
from verl.models.logprobs import (
    CHUNK_ELEMENTS_CPU,
    CHUNK_ELEMENTS_CUDA,
    CHUNK_ROWS_CPU,
    CHUNK_TILE,
    FUSED_WORDS,
    fused_head,
)

# Ids, positions, targets and columns of one packed token.
_COLUMN_BYTES = 64
# Gathered copies of a layer on several ranks: it, the next one on its way, and the buffer that it
# arrives in.
_LAYER_COPIES = 3


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """How an engine runs its model: what `TrainEngine` is told, in the terms that memory depends
    on."""

    on_cuda: bool = True
    shards: bool = True  # FSDP2; False: a plain module, one process on a CPU
    shard_ranks: int = 1  # that hold one copy of the weights
    compute_itemsize: int = 2
    fused_head: bool = False  # log-probs without gradient need no logits
    keeps_gathered: bool = False  # all weights, from the first pass of a mini-batch to its last
    compiled: bool = True
    fused_mlp: bool = False  # without gradient SwiGLU is within the product of gate and up
    checkpointing_share: float = 0.0  # of the layers; 0: none recomputes
    activation_offload: bool = False
    optimizer: str | None = "AdamW"
    param_offload: bool = False
    optimizer_offload: bool = False
    offload_policy: bool = False


def engine_setup(
    fsdp: FSDPConfig,
    optim: OptimConfig | None,
    *,
    on_cuda: bool,
    shard_ranks: int | None,
    compute_itemsize: int,
    compiled: bool,
    fused_mlp: bool,
    checkpointing_share: float,
    activation_offload: bool,
) -> EngineSetup:
    """From what `TrainEngine` is told. `shard_ranks` None: nothing is sharded;
    `checkpointing_share` 0: no layer recomputes. Whether weights stay gathered is for
    `gathers_once`, or for an engine that knows."""
    moves = shard_ranks is not None and not fsdp.offload_policy
    return EngineSetup(
        on_cuda=on_cuda,
        shards=shard_ranks is not None,
        shard_ranks=shard_ranks or 1,
        compute_itemsize=compute_itemsize,
        # Where no card is visible, a plan is for any.
        fused_head=on_cuda
        and compute_itemsize == 2
        and torch.cuda.is_available()
        and fused_head(torch.device("cuda")),
        compiled=compiled,
        fused_mlp=fused_mlp,
        checkpointing_share=checkpointing_share,
        activation_offload=activation_offload,
        optimizer=None if optim is None else optim.optimizer,
        param_offload=moves and fsdp.param_offload,
        optimizer_offload=moves and fsdp.optimizer_offload and optim is not None,
        offload_policy=shard_ranks is not None and fsdp.offload_policy,
    )


def gathers_once(
    shape: ModelShape, setup: EngineSetup, fsdp: FSDPConfig, device_bytes: int | None
) -> EngineSetup:
    """`setup` with the choice of `verl.distributed.fsdp.keeps_gathered`, for a device of so many
    bytes."""
    if not setup.shards or setup.offload_policy:
        return setup
    if fsdp.reshard_after_forward is not None:
        # On several ranks False keeps them from the forward pass to the backward pass.
        return replace(setup, keeps_gathered=fsdp.reshard_after_forward is False)
    if setup.shard_ranks > 1 or not setup.on_cuda or device_bytes is None:
        return setup
    needed = sum(
        weight.numel() * (setup.compute_itemsize + weight.itemsize * (4 if weight.trained else 1))
        for weight in shape.weights
    )
    return replace(setup, keeps_gathered=needed <= GATHERED_SHARE * device_bytes)


class EngineFootprint:
    """Bytes of one rank. Properties are what stays; `forward` and `update` what a pass takes beside
    it, as parts with names, at the moment when it takes most."""

    def __init__(self, shape: ModelShape, setup: EngineSetup) -> None:
        self.shape = shape
        self.setup = setup

    # ---------------------------------------------------------------- what stays

    @cached_property
    def parameters(self) -> int:
        return sum(weight.numel(self._ranks) * weight.itemsize for weight in self.shape.weights)

    @cached_property
    def gradients(self) -> int:
        """In the dtype of the parameters, from the first pass of a mini-batch to its optimizer
        step."""
        return sum(weight.numel(self._ranks) * weight.itemsize for weight in self._trained)

    @cached_property
    def moments(self) -> int:
        """From the first optimizer step on. Of AdamW two of each element and the count of steps,
        fp32; in 8 bits a code and 1/256 of an fp32 scale, from 4,096 elements on; of Muon one, for
        matrices of the layers."""
        total = 0
        for weight in self._trained:
            numel = weight.numel(self._ranks)
            if self.setup.optimizer == "AdamW8bit" and numel >= 4096 and numel % 256 == 0:
                total += 2 * (numel + numel // 256 * 4)
            elif self.setup.optimizer == "Muon" and weight.in_layer and len(weight.shape) == 2:
                total += numel * weight.itemsize
            elif self.setup.optimizer is not None:
                total += 2 * numel * weight.itemsize + 4
        return total

    @property
    def resident(self) -> int:
        """On the device between phases."""
        setup = self.setup
        parameters = 0 if setup.param_offload or setup.offload_policy else self.parameters
        return parameters + (0 if setup.optimizer_offload or setup.offload_policy else self.moments)

    @property
    def on_host(self) -> int:
        """Of one rank: what is off-loaded, in pinned pieces."""
        setup = self.setup
        if setup.offload_policy:
            return self.parameters + self.moments + self.gradients
        kept = (setup.param_offload * self.parameters, setup.optimizer_offload * self.moments)
        return sum(-(-num_bytes // CHUNK_BYTES) * CHUNK_BYTES for num_bytes in kept)

    # ---------------------------------------------------------------- phases

    def forward(self, tokens: int, predictions: int) -> dict[str, int]:
        """A pass without gradients over packed tokens, of which so many predict a response
        token."""
        shape, width = self.shape, self.setup.compute_itemsize
        # The MLP is the widest place: gate, up and their product at once (compiled, the product
        # overwrites the gate), beside the residual and the normalised states. Fused there is the
        # product alone, and both matrices as one.
        fused = self.setup.fused_mlp
        wide = (
            1 if fused else 2 if self.setup.compiled else 3
        ) * shape.intermediate + 3 * shape.hidden
        attention = 2 * shape.query + 2 * shape.key + 3 * shape.hidden
        stacked = 2 * shape.intermediate * shape.hidden if fused else 0
        layer = width * max(wide * tokens + stacked, attention * tokens)
        # The last states, those that predict, and what the last norm computes in fp32 (it is not
        # compiled).
        head = width * shape.hidden * (2 * tokens + predictions) + self._logits(predictions)
        columns = {"columns": _COLUMN_BYTES * tokens}
        return _largest(
            {"gathered weights": self.gathered, "one layer": layer, **columns},
            {"gathered weights": self._gathered_at_head, "logits and last states": head, **columns},
        )

    def update(self, tokens: int, predictions: int) -> dict[str, int]:
        """Forward and backward of a micro-batch when others have left their gradients."""
        kept = self._kept(tokens)
        parts = {
            "gradients": 0 if self.setup.offload_policy else self.gradients,
            "columns": _COLUMN_BYTES * tokens,
        }
        return _largest(
            {
                "gathered weights": self._gathered_at_head,
                **parts,
                **kept,
                **self._at_head(tokens, predictions),
            },
            {"gathered weights": self.gathered, **parts, **kept, **self._in_layer(tokens)},
            # When all activations are gone.
            {
                "gathered weights": self.gathered if self.setup.keeps_gathered else 0,
                **parts,
                "reduced gradients of embedding and head": self._reduction(rest=True),
            },
        )

    def update_with_divergences(
        self, frozen: Mapping[str, ModelShape], tokens: int, predictions: int
    ) -> dict[str, int]:
        """Predict `update` where the loss compares whole distributions with those of frozen models:
        in addition their states, and one chunk of logits (`verl.models.divergence`)."""
        parts = self.update(tokens, predictions)
        rows = max(1, self._chunk_rows(predictions) // CHUNK_TENSORS)
        for name, shape in frozen.items():
            states = self.setup.compute_itemsize * shape.hidden * predictions
            words = min(shape.vocabulary, self.shape.vocabulary)
            parts[f"divergence from the {name}"] = states + 4 * CHUNK_TENSORS * rows * words
        return parts

    def layer_activations(self) -> int:
        """Bytes of one token that autograd keeps of one layer that does not recompute.

        Both ways: the residual before attention and after it, 2H; the inputs of the projections, of
        o_proj (which is attention's output) and of the MLP's three matrices, whose weights need
        them for their gradients; rotated queries, keys and values, and one log-sum-exp a head, for
        attention's kernel. Compiled layers keep no other result of element-wise work: it is made
        again. The product of gate and up is input of a matrix product, which is why that one is
        kept. Eager layers keep of each norm, instead of the residual, its fp32 copy and the result
        before the norm's weight; of the MLP silu(gate) besides gate, up and the product.
        """
        shape, width = self.shape, self.setup.compute_itemsize
        attention = 2 * shape.query + 2 * shape.key
        heads = (shape.query + shape.key) if shape.norms_heads else 0
        if self.setup.compiled:
            elements = 4 * shape.hidden + attention + 3 * shape.intermediate + heads
            return width * elements + 4 * (shape.heads + 2)
        elements = 4 * shape.hidden + attention + 4 * shape.intermediate + heads
        copies = 2 * shape.hidden + heads if width < 4 else 2 * shape.hidden
        return width * elements + 4 * copies + 4 * (shape.heads + 2)

    def load(self) -> int:
        """While weights come to the device: all shards, and whole what is being cut, a layer or
        what lies outside the layers."""
        if not self.setup.shards:
            return self.parameters
        rest = [weight for weight in self.shape.weights if not weight.in_layer]
        layer = [weight for weight in self.shape.weights if weight.in_first_layer]
        whole = max(
            sum(weight.numel() * weight.itemsize for weight in part) for part in (rest, layer)
        )
        shards = 0 if self.setup.offload_policy else self.parameters
        return shards + whole

    @property
    def largest_whole(self) -> int:
        """The largest parameter of all, in its own dtype: what a gathering of one after the other
        takes."""
        return max(weight.numel() * weight.itemsize for weight in self.shape.weights)

    # ---------------------------------------------------------------- terms

    @property
    def _ranks(self) -> int:
        return self.setup.shard_ranks if self.setup.shards else 1

    @cached_property
    def _trained(self) -> list[Weight]:
        return [
            weight
            for weight in self.shape.weights
            if weight.trained and self.setup.optimizer is not None
        ]

    @cached_property
    def _layer_numel(self) -> int:
        return sum(weight.numel() for weight in self.shape.weights if weight.in_first_layer)

    @cached_property
    def _trained_layer(self) -> int:
        return sum(weight.numel() for weight in self._trained if weight.in_first_layer)

    @cached_property
    def _trained_rest(self) -> int:
        return sum(weight.numel() for weight in self._trained if not weight.in_layer)

    @cached_property
    def gathered(self) -> int:
        """Copies in the dtype of computation: of all weights, or of a layer and of what lies
        outside the layers."""
        if not self.setup.shards or self.setup.keeps_gathered:
            return self._gathered_at_head
        copies = 1 if self._ranks == 1 else _LAYER_COPIES
        return self._gathered_at_head + self.setup.compute_itemsize * copies * self._layer_numel

    @cached_property
    def _gathered_at_head(self) -> int:
        """Where no layer computes, those that do not stay gathered are gone."""
        if not self.setup.shards:
            return 0
        weights = self.shape.weights
        numel = sum(
            weight.numel() for weight in weights if self.setup.keeps_gathered or not weight.in_layer
        )
        return self.setup.compute_itemsize * numel

    def _kept(self, tokens: int) -> dict[str, int]:
        """From the forward pass to the backward pass: whole layers, and inputs of those that
        recompute."""
        shape, setup = self.shape, self.setup
        recomputing = math.ceil(setup.checkpointing_share * shape.layers)
        inputs = setup.compute_itemsize * shape.hidden * recomputing
        if setup.activation_offload:
            # on their way out, or in
            inputs = min(inputs, 3 * setup.compute_itemsize * shape.hidden)
        return {
            "activations": self.layer_activations() * (shape.layers - recomputing) * tokens,
            "inputs of layers that recompute": inputs * tokens,
        }

    def _logits(self, predictions: int) -> int:
        """One chunk in fp32: a token's row of the vocabulary is never there for all tokens at once.
        On a CPU the product comes in its own dtype first. Of a fused head three numbers a tile."""
        if not self.shape.vocabulary:
            return 0
        if self.setup.fused_head:
            return 4 * 3 * -(-self.shape.vocabulary // FUSED_WORDS) * predictions
        product = (
            self.setup.compute_itemsize
            if not self.setup.on_cuda and self.setup.compute_itemsize < 4
            else 0
        )
        return (4 + product) * self._chunk_rows(predictions) * self.shape.vocabulary

    def _chunk_rows(self, predictions: int) -> int:
        """As `verl.models.logprobs.token_log_probs` cuts them."""
        vocabulary = self.shape.vocabulary
        cpu = max(CHUNK_ELEMENTS_CPU, CHUNK_ROWS_CPU * vocabulary)
        rows = max(1, (CHUNK_ELEMENTS_CUDA if self.setup.on_cuda else cpu) // vocabulary)
        return min(predictions, rows - rows % CHUNK_TILE if rows > CHUNK_TILE else rows)

    def _at_head(self, tokens: int, predictions: int) -> dict[str, int]:
        """In the backward pass of the log-probs, when every layer's activations are there."""
        shape, width = self.shape, self.setup.compute_itemsize
        # The last norm is not compiled: fp32 copy, result before its weight, result. Then the
        # states that predict, and their gradient.
        states = (4 + 2 * width) * shape.hidden * tokens + 2 * width * shape.hidden * predictions
        if not shape.vocabulary:
            return {"last states": states}
        rows = self._chunk_rows(predictions)
        # Beside a chunk its gradient, for a moment also that of the chunk before; the gradient of
        # the head's weight is added up in fp32, and at the end cast while the last chunk still lies
        # there.
        chunk = rows * shape.vocabulary
        gradient = width * chunk
        before = gradient if predictions > rows else 0
        chunks = gradient + max(before + 4 * shape.head_numel, (4 + width) * shape.head_numel)
        # Without the kernels of CUDA two more of log-probs and probabilities.
        plain = 0 if self.setup.on_cuda else 8 * chunk
        return {"last states": states, "logits": 4 * chunk + chunks + plain}

    def _in_layer(self, tokens: int) -> dict[str, int]:
        """In the backward pass of an MLP: the gradient of its product, and of the states before and
        behind it; the layer itself where it recomputes; the gradients of its weights, beside those
        of the layer before, which are being reduced, and of the head, which wait for the
        embedding's."""
        shape, width = self.shape, self.setup.compute_itemsize
        recomputed = self.layer_activations() if self.setup.checkpointing_share == 1 else 0
        # the gradients of silu(gate) and of up come apart
        eager = 0 if self.setup.compiled else shape.intermediate
        moving = width * (shape.intermediate + eager + 2 * shape.hidden)
        weights = width * (self._trained_layer + shape.head_numel)
        return {
            "one layer": (recomputed + moving) * tokens,
            "gradients of a layer and the head": weights + self._reduction(rest=False),
        }

    def _reduction(self, *, rest: bool) -> int:
        """fp32 buffers of a unit whose gradients are reduced over the ranks: all of it and this
        rank's part."""
        if not self.setup.shards:
            return 0
        numel = self._trained_rest if rest else self._trained_layer
        if not rest or self.setup.keeps_gathered:
            return 4 * numel
        return 4 * numel + max(self.setup.compute_itemsize * numel, 4 * -(-numel // self._ranks))


def _largest(*moments: dict[str, int]) -> dict[str, int]:
    """The moment that takes most, without the parts that are nothing."""
    largest = max(moments, key=lambda parts: sum(parts.values()))
    return {name: count for name, count in largest.items() if count}
