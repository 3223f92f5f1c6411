"""The shape of a model as far as memory depends on it; the module may be on the meta device."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from verl.engine.compile import FAMILIES
from verl.engine.flops import head_sizes, num_experts
from verl.engine.tower_shape import TowerShape
from verl.models.vision import language_layers, picture_parameters
from verl.utils.arithmetic import ceil_div


class Weight(NamedTuple):
    """One parameter; a tied one is listed once."""

    shape: tuple[int, ...]
    itemsize: int
    trained: bool
    in_layer: bool
    in_first_layer: bool

    def numel(self, ranks: int = 1) -> int:
        """Count the elements of the largest shard: FSDP2 cuts the first dimension and fills up."""
        if not self.shape:
            return 1
        return ceil_div(self.shape[0], ranks) * math.prod(self.shape[1:])

    def num_bytes(self, ranks: int = 1) -> int:
        """Count the bytes of the largest shard."""
        return self.numel(ranks) * self.itemsize


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Weights of a module, and the widths that activations follow from."""

    family: str
    weights: tuple[Weight, ...]
    layers: int
    hidden: int
    heads: int
    query: int  # query heads * head size
    key: int  # key heads * head size
    cached: int  # numbers that the engine keeps for each token and layer
    intermediate: int  # of the MLP; of experts, all that a token visits
    vocabulary: int  # 0 without a head over the vocabulary
    head_numel: int  # of the head's weight, where it gets a gradient
    norms_heads: bool  # Qwen3 normalises queries and keys
    tower_numel: int = 0  # of the weights that only pictures use
    tower: TowerShape | None = None  # None: a model of text

    @property
    def is_llama_like(self) -> bool:
        return self.family in FAMILIES

    @property
    def is_adapted(self) -> bool:
        """Whether adapters are trained within frozen weights."""
        return 0 < self.trained_numel < self.numel

    @cached_property
    def numel(self) -> int:
        return sum(weight.numel() for weight in self.weights)

    @cached_property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes() for weight in self.weights)

    @cached_property
    def largest_numel(self) -> int:
        return max(weight.numel() for weight in self.weights)

    @cached_property
    def trained_numel(self) -> int:
        return sum(weight.numel() for weight in self.weights if weight.trained)

    @classmethod
    def from_module(cls, module: nn.Module) -> "ModelShape":
        """Read a causal LM, a critic, or a wrapper; sharded, with adapters, or on meta."""
        model: Any = module if hasattr(module, "config") else getattr(module, "model", module)
        config: Any = model.config.get_text_config()
        layers = language_layers(model)
        norms_heads = False
        if layers:
            norms_heads = any("q_norm" in name for name, _ in layers[0].named_modules())

        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        head_numel = 0
        if head is not None and head.weight.requires_grad:
            head_numel = head.weight.numel()

        heads = config.num_attention_heads
        head_dim, _ = head_sizes(config)
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        latent = getattr(config, "kv_lora_rank", None)
        # Multi-head latent attention keeps one latent and one rotary key for all heads.
        cached = latent + config.qk_rope_head_dim if latent else 2 * key_heads * head_dim

        return cls(
            family=config.model_type,
            weights=_weights(model, layers),
            layers=len(layers),
            hidden=config.hidden_size,
            heads=heads,
            query=heads * head_dim,
            key=key_heads * head_dim,
            cached=cached,
            intermediate=_visited_width(config),
            vocabulary=0 if head is None else head.weight.shape[0],
            head_numel=head_numel,
            norms_heads=norms_heads,
            tower_numel=sum(each.numel() for each in picture_parameters(model)),
            tower=TowerShape.of(model),
        )


def _weights(model: nn.Module, layers: list[nn.Module]) -> tuple[Weight, ...]:
    """List all weights of a model, with whether they lie in its layers and in the first one."""
    in_layers: set[int] = set()
    for layer in layers:
        in_layers.update(map(id, layer.parameters()))
    in_first: set[int] = set()
    if layers:
        in_first.update(map(id, layers[0].parameters()))

    weights = []
    for each in model.parameters():
        places = (id(each) in in_layers, id(each) in in_first)
        weights.append(Weight(tuple(each.shape), each.itemsize, each.requires_grad, *places))
    return tuple(weights)


def _visited_width(config: Any) -> int:
    """Return the width of the MLPs that a token visits."""
    width = 4 * config.hidden_size
    for name in ("n_inner", "ffn_dim", "intermediate_size"):  # the last one that is set counts
        width = getattr(config, name, None) or width
    if not num_experts(config):
        return width

    own = getattr(config, "moe_intermediate_size", None) or width
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    shared += own * (getattr(config, "n_shared_experts", None) or 0)
    visited = config.num_experts_per_tok * own + shared
    has_dense_layers = bool(getattr(config, "first_k_dense_replace", None))
    return max(width, visited) if has_dense_layers else visited
