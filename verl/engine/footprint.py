"""Predict the bytes that an engine holds, from shapes alone: the model may be on the meta device.

The terms are those of a layer like Llama's (norm, attention with rotary positions, norm, gated
MLP). For another family (`ModelShape.is_llama_like` is False) they are a bound by analogy: a plain
MLP counts as a gated one of its width, experts count as those that a token visits. The size of a
phase is its bytes at the worst moment, without the resident ones.
"""

import math
from collections.abc import Mapping
from functools import cached_property

from verl.distributed.offload import CHUNK_BYTES
from verl.engine.engine_setup import EngineSetup
from verl.engine.model_shape import ModelShape, Weight
from verl.engine.tower_footprint import TowerFootprint
from verl.models.divergence import CHUNK_TENSORS
from verl.models.logprobs import FUSED_WORDS, chunk_rows
from verl.utils.arithmetic import ceil_div, round_up

# Ids, positions, targets and columns of one packed token.
_COLUMN_BYTES = 64
# Gathered copies of a layer on several ranks: it, the next one on its way, and the buffer that it
# arrives in.
_LAYER_COPIES = 3
# Inputs of layers that recompute, on their way to the host or back, that the device holds at once.
_MOVING_INPUTS = 3


class EngineFootprint:
    """Bytes of one rank.

    Properties are resident bytes. `forward` and `update` give the further bytes of a pass, as named
    parts, at the moment when it takes most.
    """

    def __init__(self, shape: ModelShape, setup: EngineSetup) -> None:
        self.shape = shape
        self.setup = setup

    # ---------------------------------------------------------------- resident bytes

    @cached_property
    def parameters(self) -> int:
        return sum(weight.num_bytes(self._ranks) for weight in self.shape.weights)

    @cached_property
    def gradients(self) -> int:
        """Gradients in the parameters' dtype: from a mini-batch's first pass to its step."""
        return sum(weight.num_bytes(self._ranks) for weight in self._trained)

    @cached_property
    def moments(self) -> int:
        """Moments of the optimizer, from its first step on.

        AdamW has two of each element and the count of steps, fp32. In 8 bits an element takes a
        code and 1/256 of an fp32 scale, from 4,096 elements on. Muon has one, for matrices of the
        layers.
        """
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
        """Bytes on the device between phases."""
        setup = self.setup
        resident = 0
        if not setup.param_offload and not setup.offload_policy:
            resident += self.parameters
        if not setup.optimizer_offload and not setup.offload_policy:
            resident += self.moments
        return resident

    @property
    def on_host(self) -> int:
        """Off-loaded bytes of one rank, in pinned pieces."""
        setup = self.setup
        if setup.offload_policy:
            return self.parameters + self.moments + self.gradients
        kept = (setup.param_offload * self.parameters, setup.optimizer_offload * self.moments)
        return sum(round_up(num_bytes, CHUNK_BYTES) for num_bytes in kept)

    # ---------------------------------------------------------------- phases

    def forward(self, tokens: int, predictions: int, picture_tokens: int = 0) -> dict[str, int]:
        """Predict a pass without gradients over `tokens` packed tokens.

        Args:
            predictions: tokens among them that predict a response token.
            picture_tokens: tokens of its different pictures; a model of text ignores them.
        """
        shape = self.shape
        width = self.setup.compute_itemsize
        # The MLP is the widest place: gate, up and their product at once (compiled, the product
        # overwrites the gate), together with the residual and the normalised states. Fused, only
        # the product exists, and both matrices are one.
        fused = self.setup.fused_mlp
        if fused:
            mlp_tensors = 1
        elif self.setup.compiled:
            mlp_tensors = 2
        else:
            mlp_tensors = 3
        wide = mlp_tensors * shape.intermediate + 3 * shape.hidden
        attention = 2 * shape.query + 2 * shape.key + 3 * shape.hidden
        stacked = 2 * shape.intermediate * shape.hidden if fused else 0
        layer = width * max(wide * tokens + stacked, attention * tokens)

        # The last states, those that predict, and the last norm's fp32 values (it is not compiled).
        head = width * shape.hidden * (2 * tokens + predictions) + self._logits(predictions)
        columns = {"columns": _COLUMN_BYTES * tokens}
        moments = [
            {"gathered weights": self.gathered, "one layer": layer, **columns},
            {"gathered weights": self._gathered_at_head, "logits and last states": head, **columns},
        ]
        if self.tower is not None:
            deep = {"features of pictures": self.tower.deep_features(picture_tokens)}
            moments = [{**moment, **deep} for moment in moments]
            tower = self.tower.forward(picture_tokens)
            moments.append(
                {"gathered weights": self._gathered_at_head, "vision tower": tower, **columns}
            )
        return _largest(*moments)

    def update(self, tokens: int, predictions: int, picture_tokens: int = 0) -> dict[str, int]:
        """Predict forward and backward of a micro-batch, with the gradients of earlier ones.

        Args:
            tokens, predictions, picture_tokens: as of `forward`.
        """
        kept = self._kept(tokens)
        parts = {
            "gradients": 0 if self.setup.offload_policy else self.gradients,
            "columns": _COLUMN_BYTES * tokens,
        }
        tower_moments: list[dict[str, int]] = []
        if self.tower is not None:
            tower_moments = self._with_tower(self.tower, tokens, picture_tokens, parts)
            kept["vision tower"] = self.tower.kept(picture_tokens)
            kept["features of pictures"] = self.tower.deep_features(picture_tokens)

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
            *tower_moments,
        )

    def update_with_divergences(
        self,
        frozen: Mapping[str, ModelShape],
        tokens: int,
        predictions: int,
        picture_tokens: int = 0,
    ) -> dict[str, int]:
        """Predict `update` where the loss compares whole distributions with frozen models'.

        The update then also holds their states, and one chunk of logits
        (`verl.models.divergence`).
        """
        parts = self.update(tokens, predictions, picture_tokens)
        rows = max(1, self._chunk_rows(predictions) // CHUNK_TENSORS)
        for name, shape in frozen.items():
            states = self.setup.compute_itemsize * shape.hidden * predictions
            words = min(shape.vocabulary, self.shape.vocabulary)
            parts[f"divergence from the {name}"] = states + 4 * CHUNK_TENSORS * rows * words
        return parts

    def layer_activations(self) -> int:
        """Return the bytes of a token that autograd keeps in a layer that does not recompute.

        Compiled and eager: the residual before attention and after it, 2H; the inputs of the
        projections, of o_proj (which is attention's output) and of the MLP's three matrices, for
        the gradients of their weights; rotated queries, keys and values, and one
        log-sum-exp a head, for attention's kernel. Compiled layers keep no other result of
        element-wise work: it is made again. The product of gate and up is input of a matrix
        product, which is why that one is kept. Eager layers keep of each norm, instead of the
        residual, its fp32 copy and the result before the norm's weight; of the MLP silu(gate)
        besides gate, up and the product.
        """
        shape = self.shape
        width = self.setup.compute_itemsize
        attention = 2 * shape.query + 2 * shape.key
        heads = (shape.query + shape.key) if shape.norms_heads else 0
        if self.setup.compiled:
            elements = 4 * shape.hidden + attention + 3 * shape.intermediate + heads
            return width * elements + 4 * (shape.heads + 2)
        elements = 4 * shape.hidden + attention + 4 * shape.intermediate + heads
        copies = 2 * shape.hidden
        if width < 4:
            copies += heads
        return width * elements + 4 * copies + 4 * (shape.heads + 2)

    def load(self) -> int:
        """Predict the loading of weights: all shards, and the part being cut as a whole.

        That part is a layer, or everything outside the layers.
        """
        if not self.setup.shards:
            return self.parameters
        weights = self.shape.weights
        rest = sum(weight.num_bytes() for weight in weights if not weight.in_layer)
        layer = sum(weight.num_bytes() for weight in weights if weight.in_first_layer)
        shards = 0 if self.setup.offload_policy else self.parameters
        return shards + max(rest, layer)

    @property
    def largest_whole(self) -> int:
        """The largest parameter, in its own dtype: the bytes to gather one after the other."""
        return max(weight.num_bytes() for weight in self.shape.weights)

    @cached_property
    def tower(self) -> TowerFootprint | None:
        """The footprint of the vision tower; None for a model of text."""
        if self.shape.tower is None:
            return None
        recomputing, _ = self._recomputing
        return TowerFootprint(
            shape=self.shape.tower,
            itemsize=self.setup.compute_itemsize,
            compiled=self.setup.compiled,
            on_cuda=self.setup.on_cuda,
            recomputing=recomputing,
            most_inputs=_MOVING_INPUTS if self.setup.activation_offload else None,
        )

    # ---------------------------------------------------------------- terms

    @property
    def _ranks(self) -> int:
        return self.setup.shard_ranks if self.setup.shards else 1

    @cached_property
    def _trained(self) -> list[Weight]:
        if self.setup.optimizer is None:
            return []
        return [weight for weight in self.shape.weights if weight.trained]

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
        """Gathered copies in the compute dtype.

        All weights, or a layer and everything outside the layers.
        """
        if not self.setup.shards or self.setup.keeps_gathered:
            return self._gathered_at_head
        copies = 1 if self._ranks == 1 else _LAYER_COPIES
        return self._gathered_at_head + self.setup.compute_itemsize * copies * self._layer_numel

    @cached_property
    def _gathered_at_head(self) -> int:
        """Gathered copies while no layer computes: layers that do not stay gathered are gone."""
        if not self.setup.shards:
            return 0
        weights = self.shape.weights
        numel = sum(
            weight.numel() for weight in weights if self.setup.keeps_gathered or not weight.in_layer
        )
        return self.setup.compute_itemsize * numel

    @property
    def _recomputing(self) -> tuple[int, int]:
        """Count the layers of the tower and of the language model that recompute.

        `apply_checkpointing` counts the layers of both together, and those of the tower come first.
        """
        in_tower = 0 if self.shape.tower is None else self.shape.tower.layers
        total = math.ceil(self.setup.checkpointing_share * (in_tower + self.shape.layers))
        of_tower = min(in_tower, total)
        return of_tower, total - of_tower

    def _with_tower(
        self, tower: TowerFootprint, tokens: int, picture_tokens: int, parts: dict[str, int]
    ) -> list[dict[str, int]]:
        """Return the moments of an update at which the vision tower computes.

        Before the language model it holds what a pass without gradients does, or what it keeps. In
        its backward pass no activation of the language model is left, but the gradients of its
        embeddings. The gradients of weights outside the language model's layers wait for one
        another: those of the head from the beginning, those of the tower grow as it frees layers.
        """
        kept = tower.kept(picture_tokens)
        whole = {"gathered weights": self._gathered_at_head, **parts}
        moments = [{**whole, "vision tower": max(kept, tower.forward(picture_tokens))}]
        if not tower.shape.trained:
            return moments

        width = self.setup.compute_itemsize
        embeddings = 2 * width * self.shape.hidden * tokens
        rest = self._trained_rest if self.setup.shards else 0
        for in_tower, waiting in (
            (kept + tower.backward(picture_tokens), self.shape.head_numel),
            (tower.first_layer(picture_tokens), rest),
        ):
            moments.append(
                {
                    **whole,
                    "vision tower": in_tower,
                    "gradients of embeddings": embeddings,
                    "gradients of the tower and the head": width * waiting,
                }
            )
        return moments

    def _kept(self, tokens: int) -> dict[str, int]:
        """Return the bytes kept from forward to backward pass.

        Whole layers keep their activations, layers that recompute their inputs.
        """
        shape = self.shape
        setup = self.setup
        _, recomputing = self._recomputing
        inputs = setup.compute_itemsize * shape.hidden * recomputing
        if setup.activation_offload:
            # on their way out, or in
            inputs = min(inputs, _MOVING_INPUTS * setup.compute_itemsize * shape.hidden)
        return {
            "activations": self.layer_activations() * (shape.layers - recomputing) * tokens,
            "inputs of layers that recompute": inputs * tokens,
        }

    def _logits(self, predictions: int) -> int:
        """Return the bytes of one chunk of logits in fp32; no more exist at once.

        On a CPU the product comes in its own dtype first. A fused head keeps three numbers a tile.
        """
        if not self.shape.vocabulary:
            return 0
        if self.setup.fused_head:
            return 4 * 3 * ceil_div(self.shape.vocabulary, FUSED_WORDS) * predictions

        itemsize = 4
        if not self.setup.on_cuda and self.setup.compute_itemsize < 4:
            itemsize += self.setup.compute_itemsize
        return itemsize * self._chunk_rows(predictions) * self.shape.vocabulary

    def _chunk_rows(self, predictions: int) -> int:
        """Return the rows of a chunk, as `verl.models.logprobs.token_log_probs` cuts them."""
        rows = chunk_rows(self.shape.vocabulary, on_cuda=self.setup.on_cuda)
        return min(predictions, rows)

    def _at_head(self, tokens: int, predictions: int) -> dict[str, int]:
        """Predict the backward pass of the log-probs, when all layers' activations exist."""
        shape = self.shape
        width = self.setup.compute_itemsize
        # The last norm is not compiled: fp32 copy, result before its weight, result. Then the
        # states that predict, and their gradient.
        states = (4 + 2 * width) * shape.hidden * tokens
        states += 2 * width * shape.hidden * predictions
        if not shape.vocabulary:
            return {"last states": states}

        rows = self._chunk_rows(predictions)
        # A chunk and its gradient, for a moment also that of the chunk before. The gradient of the
        # head's weight is added up in fp32, and cast at the end while the last chunk still exists.
        chunk = rows * shape.vocabulary
        gradient = width * chunk
        before = gradient if predictions > rows else 0
        chunks = gradient + max(before + 4 * shape.head_numel, (4 + width) * shape.head_numel)
        # Without the CUDA kernels also log-probs and probabilities.
        plain = 0 if self.setup.on_cuda else 8 * chunk
        return {"last states": states, "logits": 4 * chunk + chunks + plain}

    def _in_layer(self, tokens: int) -> dict[str, int]:
        """Predict the backward pass of an MLP.

        It holds the gradients of its product and of the states before and after it; the layer
        itself where it recomputes; the gradients of its weights; those of the layer before, which
        are being reduced, and of the head, which wait for the embedding's.
        """
        shape = self.shape
        width = self.setup.compute_itemsize
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
        """Return the fp32 buffers of a unit that is reduced over the ranks.

        They hold the whole unit's gradients and this rank's part, which on a single rank are one.
        """
        if not self.setup.shards:
            return 0
        numel = self._trained_rest if rest else self._trained_layer
        if not rest or self.setup.keeps_gathered:
            return 4 * numel
        gradients = self.setup.compute_itemsize * numel
        part = 4 * ceil_div(numel, self._ranks) if self._ranks > 1 else 0
        return 4 * numel + max(gradients, part)


def _largest(*moments: dict[str, int]) -> dict[str, int]:
    """Return the moment that takes most, without empty parts."""
    largest = max(moments, key=lambda parts: sum(parts.values()))
    return {name: count for name, count in largest.items() if count}
