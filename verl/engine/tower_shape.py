"""The shape of a vision tower as far as memory depends on it; it may be on the meta device."""

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from verl.distributed.fsdp import decoder_layers
from verl.models.vision import family_of, picture_parameters, reads_pictures, vision_towers
from verl.models.vision_attention import has_windows
from verl.utils.arithmetic import ceil_div


@dataclass(frozen=True, kw_only=True)
class TowerShape:
    """Sizes of a vision tower, and the traits of its layers that decide what autograd keeps."""

    layers: int
    width: int
    intermediate: int  # of the MLP
    output: int  # of a feature: the width of the language model
    heads: int
    patch_numel: int  # numbers of one patch of an image
    tile_patches: int  # that give `tile_tokens` features
    tile_tokens: int
    gated: bool  # MLP with a gate
    two_step_activation: bool  # quick_gelu, which is a product of two tensors
    rms_norm: bool
    norms_heads: bool
    scales: bool  # learnt scales of what a layer adds (InternVL)
    rotary: bool  # rotary positions, and attention within windows of any length (Qwen-VL)
    interpolates: bool  # positions are interpolated to the size of the picture (Qwen3-VL)
    deep: int  # features that go into layers of the language model (DeepStack)
    trained: bool  # any weight of the tower is
    connector_trained: bool  # any weight that only pictures use is

    def patches(self, tokens: int) -> int:
        """Return how many patches pictures with `tokens` features have."""
        return ceil_div(tokens * self.tile_patches, self.tile_tokens)

    @property
    def features(self) -> int:
        """Numbers that the tower gives for one token."""
        return (1 + self.deep) * self.output

    @classmethod
    def of(cls, model: PreTrainedModel) -> "TowerShape | None":
        """Read the tower of a model; None for a model of text.

        Numbers come from the configuration, traits from the first layer of the module.
        """
        config: Any = model.config
        if not reads_pictures(config):
            return None
        patches, tokens = family_of(config).tile(config)
        vision = config.vision_config
        width = _first_of(vision, "embed_dim", "hidden_size")
        (tower,) = vision_towers(model)
        first = decoder_layers(tower)[0]
        names = {name for name, _ in first.named_parameters()}

        return cls(
            layers=_first_of(vision, "depth", "num_hidden_layers"),
            width=width,
            intermediate=_intermediate(vision, width),
            output=config.get_text_config().hidden_size,
            heads=_first_of(vision, "num_heads", "num_attention_heads"),
            patch_numel=_patch_numel(vision),
            tile_patches=patches,
            tile_tokens=tokens,
            gated=any("gate_proj" in name for name in names),
            two_step_activation=vision.hidden_act == "quick_gelu",
            rms_norm=not any(isinstance(part, nn.LayerNorm) for part in first.modules()),
            norms_heads=bool(getattr(vision, "use_qk_norm", False)),
            scales=any(name.startswith("lambda_") for name in names),
            rotary=has_windows(tower),
            interpolates=hasattr(vision, "num_position_embeddings"),
            deep=len(getattr(vision, "deepstack_visual_indexes", None) or ()),
            trained=any(weight.requires_grad for weight in tower.parameters()),
            connector_trained=any(weight.requires_grad for weight in picture_parameters(model)),
        )


def _first_of(config: Any, *names: str) -> int:
    """Return the first of these values that exists: families name them differently."""
    for name in names:
        if hasattr(config, name):
            return getattr(config, name)
    raise AssertionError(f"{type(config).__name__} has none of {names}")


def _intermediate(vision: Any, width: int) -> int:
    if hasattr(vision, "intermediate_size"):
        return vision.intermediate_size
    return int(width * vision.mlp_ratio)


def _patch_numel(vision: Any) -> int:
    """Count the numbers of a patch: channels, frames that it joins, height and width."""
    size = vision.patch_size
    area = size**2 if isinstance(size, int) else math.prod(size)
    channels = _first_of(vision, "in_channels", "in_chans", "num_channels")
    return channels * getattr(vision, "temporal_patch_size", 1) * area
