"""The decode step of Llama-like models with fewer, larger operations than the module's own forward.

The weights are the module's own and are read at every step. A decoder lists the families that it
computes; all others decode through their module. On CUDA these include layers with experts for the
MLP (Qwen3-MoE, Mixtral, gpt-oss) and layers that norm each part before it is added (Gemma).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.models.attention import Facts
from verl.models.experts import Mixture
from verl.models.families import LLAMA_VISION_FAMILIES, rope_settings
from verl.models.vision import family_of, reads_pictures, text_body
from verl.rollout.embedded.attention import LayerShape, Paging, PrefillStep, Step
from verl.rollout.embedded.invariant import InvariantOperations
from verl.rollout.embedded.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Layer:
    """One decoder layer: its modules, and how it attends."""

    input_norm: Any
    attention: Any
    query_norm: Any  # None but for Qwen3 and Gemma3
    key_norm: Any
    post_norm: Any
    mlp: Any
    mixture: Mixture | None  # the experts of the MLP, if it is a mixture
    facts: Facts
    rotary: tuple[Tensor, Tensor]  # cos and sin (positions, D)
    # norms for the outputs of attention and of the MLP, before they are added; None but for Gemma
    attention_norm: Any = None
    feed_forward_norm: Any = None


# Families that norm both parts of a layer before they are added.
GEMMA_FAMILIES = ("gemma2", "gemma3_text")
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def can_fuse(module: PreTrainedModel, families: Sequence[str]) -> bool:
    """Check whether a decoder of `families` can replace `module`.

    Its parts must be transformers' own, not a user's subclasses, and its layer Llama's:
    h += attention(rms_norm(h)); h += down(silu(gate(n)) * up(n)) with n = rms_norm(h).
    Gemma has GELU for SiLU, and norms each part before it is added to h.
    """
    config: Any = module.config.get_text_config()
    pictures = reads_pictures(module.config)
    if config.model_type not in families:
        return False
    if pictures and config.model_type not in LLAMA_VISION_FAMILIES:
        return False
    is_gemma = config.model_type in GEMMA_FAMILIES
    activation = config.hidden_activation if is_gemma else config.hidden_act
    if activation != _ACTIVATIONS[is_gemma]:
        return False
    for settings in rope_settings(config):
        if settings.get("partial_rotary_factor", 1.0) != 1.0:
            return False

    body: Any = text_body(module)
    parts = [body, body.norm, body.rotary_emb]
    if not pictures:
        parts.append(module)
    for layer in body.layers:
        parts += [layer, layer.self_attn, layer.mlp, *_norms(layer)]
        mixture = Mixture.of(layer.mlp, config.model_type)
        if mixture is not None:
            parts += mixture.modules

    family = config.model_type.removesuffix("_text")
    home = f"transformers.models.{family}.modeling_{family}"
    return all(type(part).__module__ == home for part in parts)


def _norms(layer: Any) -> tuple[Any, ...]:
    """Return the norms of a layer: before attention, before the MLP, and Gemma's after each."""
    if hasattr(layer, "pre_feedforward_layernorm"):
        before = layer.pre_feedforward_layernorm
        return (
            layer.input_layernorm,
            before,
            layer.post_attention_layernorm,
            layer.post_feedforward_layernorm,
        )
    return layer.input_layernorm, layer.post_attention_layernorm


def _rotary_tables(
    body: Any, weight: Tensor, positions: Tensor, kind: str | None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin (positions, D) of layers of one type; None: of all layers.

    `positions` are (1, P), or (3, 1, P).
    """
    names = (kind,) if kind is not None else ()
    tables = []
    for table in body.rotary_emb(weight.new_empty(1, 1), positions, *names):
        table = table[0]
        if table.shape[-1] * 2 == body.layers[0].self_attn.head_dim:
            table = torch.cat([table, table], dim=-1)  # gpt-oss has each angle once
        tables.append(table.contiguous())
    return tables[0], tables[1]


# The residual stream is the sum of these tensors (b, H). Some decoders leave (S, b, H), to be added
# up first, or products with separate scales (`Unscaled`).
Parts = tuple[Any, ...]


class FusedDecoder(ABC):
    """Computes the layers of a decode step. Subclasses compute the parts of a layer.

    `rotary` tables cover the positions 0..max_positions - 1.
    """

    prefills: ClassVar[bool] = True  # whether it computes a `PrefillStep`, too

    def __init__(
        self,
        module: PreTrainedModel,
        paging: Paging,
        shapes: dict[nn.Module, LayerShape],
        *,
        max_positions: int,
        parallel: TensorParallel | None = None,
    ) -> None:
        body: Any = text_body(module)
        config: Any = module.config.get_text_config()
        self.family: str = config.model_type
        self.paging = paging
        self.norm: Any = body.norm
        self.embeddings: Any = module.get_input_embeddings()
        weight = self.embeddings.weight
        # Gemma multiplies embeddings by the root of their size, rounded.
        scale = getattr(self.embeddings, "embed_scale", None)
        self.embedding_scale = None if scale is None else scale.to(weight.dtype)

        positions = torch.arange(max_positions, device=weight.device)[None]
        if reads_pictures(module.config) and family_of(module.config).three_parts:
            positions = positions.expand(3, 1, -1)
        self.tables: dict[str | None, tuple[Tensor, Tensor]] = {}
        self.layers = []
        for number, layer in enumerate(body.layers):
            # Gemma3's layers with windows have other angles than those without.
            kind = config.layer_types[number] if self.family == "gemma3_text" else None
            if kind not in self.tables:
                self.tables[kind] = _rotary_tables(body, weight, positions, kind)

            input_norm, post_norm, *inner = _norms(layer)
            fused = Layer(
                input_norm=input_norm,
                attention=layer.self_attn,
                query_norm=getattr(layer.self_attn, "q_norm", None),
                key_norm=getattr(layer.self_attn, "k_norm", None),
                post_norm=post_norm,
                mlp=layer.mlp,
                mixture=Mixture.of(layer.mlp, self.family),
                facts=shapes[layer.self_attn].facts,
                rotary=self.tables[kind],
                attention_norm=inner[0] if inner else None,
                feed_forward_norm=inner[1] if inner else None,
            )
            self.layers.append(fused)
        self.cos, self.sin = self.layers[0].rotary

        if parallel is not None:
            # They replace the methods, so that a single rank has nothing more to do.
            self.attend = parallel.summed(self.attend)
            self.feed_forward = parallel.summed(self.feed_forward)

    def __call__(self, ids: Tensor, positions: Tensor, step: PrefillStep | Step) -> Tensor:
        """Compute hidden states (b, H) of token ids (b,) at positions (b,)."""
        states = F.embedding(ids, self.embeddings.weight)
        if self.embedding_scale is not None:
            states = states * self.embedding_scale
        parts: Parts = (states,)
        places = self.places(positions)
        inner = None
        with InvariantOperations() if self.paging.invariant else nullcontext():
            for layer in self.layers:
                normed, parts = self.add_norm(parts, layer.input_norm, inner)
                parts = (*parts, self.attend(layer, normed, places, step))
                normed, parts = self.add_norm(parts, layer.post_norm, layer.attention_norm)
                parts = (*parts, self.feed_forward(layer, normed))
                inner = layer.feed_forward_norm
            return self.add_norm(parts, self.norm, inner)[0]

    @abstractmethod
    def add_norm(self, parts: Parts, norm: Any, inner: Any) -> tuple[Any, Parts]:
        """Return the RMS norm of the sum of `parts`, and parts with the same sum.

        The norms within layers have the form that `attend` and `feed_forward` need. May overwrite
        the first part. `inner` norms the last of two parts before it is added; only decoders of
        Gemma get it.
        """

    @abstractmethod
    def places(self, positions: Tensor) -> Any:
        """Return the form of the positions (b,) that the layers need."""

    @abstractmethod
    def attend(self, layer: Layer, normed: Any, places: Any, step: Any) -> Any:
        """Return this rank's share of attention with its output projection, for states (b, H)."""

    @abstractmethod
    def feed_forward(self, layer: Layer, normed: Any) -> Any:
        """Return this rank's share of the gated feed-forward part, for normed states (b, H)."""
