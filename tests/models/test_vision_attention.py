"""The attention that computes all windows of all pictures at once, against transformers' own towers,
which compute one after the other."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel as Tower,
)

from tests.tiny_vision_models import tiny_vision_model
from verl.models.attention import prepare
from verl.models.vision import towers_within
from verl.models.vision_attention import IMPLEMENTATION, join_windows, window_attention

# Rows and columns of patches. Windows of Qwen2.5-VL are cut off at the right and at the bottom.
GRIDS = [(4, 6), (10, 6), (4, 6), (2, 14)]
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def joined(model: Any) -> list[Any]:
    """Return the attention modules that were given our attention."""
    modules = [module for tower in towers_within(model) for module in tower.modules()]
    configs = [getattr(module, "config", None) for module in modules]
    return [
        module
        for module, config in zip(modules, configs, strict=True)
        if getattr(config, "_attn_implementation", None) == IMPLEMENTATION
    ]


def features_and_gradients(model: Any) -> list[Tensor]:
    """Run a tower over pictures of several sizes, and back."""
    vision = model.config.vision_config
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    generator = torch.Generator().manual_seed(3)
    patches = sum(rows * columns for rows, columns in GRIDS)
    pixels = torch.randn(patches, width, generator=generator, dtype=torch.float64)
    grids = torch.tensor([(1, *grid) for grid in GRIDS])
    output = model.base_model.get_image_features(
        pixel_values=pixels, image_grid_thw=grids, return_dict=True
    )
    features = torch.cat(list(output.pooler_output))
    weight = torch.randn(features.shape, generator=generator, dtype=torch.float64)
    parameters = [each for tower in towers_within(model) for each in tower.parameters()]
    gradients = torch.autograd.grad((features * weight).sum(), parameters, allow_unused=True)
    return [features, *(each for each in gradients if each is not None)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_features_and_gradients_are_those_of_one_window_after_the_other(family):
    model: Any = tiny_vision_model(family).double()
    model.set_attn_implementation("sdpa")
    expected = features_and_gradients(model)
    assert joined(model) == []
    prepare(model)
    assert len(joined(model)) == model.config.vision_config.depth
    ours = features_and_gradients(model)
    assert len(ours) == len(expected)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_bounds_are_noticed(family, monkeypatch):
    """Windows that are joined to one have other features, so that the test above can fail."""
    model: Any = tiny_vision_model(family).double()
    expected = features_and_gradients(model)[0]
    prepare(model)
    monkeypatch.setattr(torch.Tensor, "diff", lambda bounds: bounds[[-1]])
    assert not torch.allclose(features_and_gradients(model)[0], expected, atol=1e-3)


def test_other_towers_keep_their_attention():
    model: Any = tiny_vision_model("internvl")
    prepare(model)
    assert joined(model) == []


def test_a_model_of_the_same_configuration_is_one_of_transformers():
    model: Any = tiny_vision_model("qwen2_5_vl")
    prepare(model)
    again = type(model)(model.config)
    assert joined(again) == []


def test_a_mask_is_refused():
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(AssertionError, match="no mask"):
        window_attention(
            torch.nn.Identity(),
            *(q, q, q, torch.ones(2, 2)),
            scaling=1.0,
            cu_seq_lens_q=torch.tensor([0, 2]),
        )


def test_layers_leave_the_longest_window_to_the_attention(monkeypatch):
    config = Qwen2_5_VLVisionConfig(
        depth=1, hidden_size=32, num_heads=4, intermediate_size=48, out_hidden_size=32
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    tower = Tower(config)
    attention = tower.blocks[0].attn
    states = torch.randn(12, 32)
    bounds = torch.tensor([0, 4, 12], dtype=torch.int32)
    rotation = (torch.randn(12, 8), torch.randn(12, 8))

    expected = attention(states, cu_seqlens=bounds, position_embeddings=rotation)
    join_windows(tower)

    def read(tensor):
        raise AssertionError("a layer reads a number from the device")

    monkeypatch.setattr(torch.Tensor, "item", read)
    actual = attention(states, cu_seqlens=bounds, position_embeddings=rotation)

    torch.testing.assert_close(actual, expected)
