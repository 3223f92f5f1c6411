"""Grouped experts against those of transformers."""

import copy
from typing import Any

import pytest
import torch

from tests.tiny_models import tiny_model
from verl.models.grouped_experts import IMPLEMENTATION, use_grouped_experts


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_outputs_and_gradients_equal_those_of_transformers(family: str):
    theirs: Any = tiny_model(family)
    ours = copy.deepcopy(theirs)
    theirs.set_experts_implementation("eager")
    ours.set_experts_implementation("grouped_mm")
    assert use_grouped_experts(ours)
    assert ours.config._experts_implementation == IMPLEMENTATION

    ids = torch.randint(3, 100, (2, 20), generator=torch.Generator().manual_seed(0))
    for model in (theirs, ours):
        logits = model(input_ids=ids, use_cache=False).logits
        logits.log_softmax(-1).square().mean().backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters()):
        error = (one.grad - other.grad).norm() / other.grad.norm().clamp(min=1e-9)
        assert error < 1e-4, (name, error)


def test_dense_models_and_other_implementations_stay():
    assert not use_grouped_experts(tiny_model("qwen2"))
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("eager")
    assert not use_grouped_experts(model)
