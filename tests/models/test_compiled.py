"""Compiled vision towers give the features of uncompiled ones."""

import logging
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.tiny_vision_models import tiny_vision_model
from verl.models.attention import prepare
from verl.models.compiled import compile_towers
from verl.models.vision import example_picture, picture_features, towers_within

# Qwen3-VL has features of inner layers, too.
FAMILIES = (
    "qwen3_vl",
    pytest.param("qwen2_vl", marks=pytest.mark.slow),
    pytest.param("qwen2_5_vl", marks=pytest.mark.slow),
)


@pytest.fixture(autouse=True)
def clean_start(monkeypatch):
    """Reset counters and caches before each test."""
    torch._dynamo.reset()
    counters.clear()
    # Capturing torch's log lines of a graph in pytest takes longer than the compilation.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)


@torch.inference_mode()
def features(model: Any, count: int) -> torch.Tensor:
    pictures = [example_picture(model, seed) for seed in range(count)]
    found, deep = picture_features(model, pictures)
    return torch.cat([found, *deep])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_tower_gives_the_same_features_by_the_same_graphs(family):
    """Another number of patches needs no graph of its own."""
    model: Any = tiny_vision_model(family)
    prepare(model)
    expected = [features(model, count) for count in (2, 3, 5, 4)]
    compile_towers(model, backend="aot_eager")
    graphs = []
    for count, other in zip((2, 3, 5, 4), expected, strict=True):
        torch.testing.assert_close(features(model, count), other, rtol=1e-5, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs == [graphs[0]] * 4


def test_a_tower_of_fixed_pictures_stays_as_it_is():
    model: Any = tiny_vision_model("internvl")
    prepare(model)
    compile_towers(model, backend="aot_eager")
    for tower in towers_within(model):
        assert not any("forward" in vars(module) for module in tower.modules())
