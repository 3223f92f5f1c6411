"""FLOPs against a hand count and against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.tiny_models import tiny_model
from verl.engine.flops import (
    FlopsModel,
    causal_pairs,
    model_flops_utilization,
    peak_bf16_flops,
)
from verl.models.lora import apply_lora


def test_causal_pairs_match_a_mask():
    for length, window in ((1, None), (7, None), (7, 3), (7, 7), (7, 20)):
        position = torch.arange(length)
        distance = position[:, None] - position[None, :]
        seen = (distance >= 0) & (distance < (window or length))
        assert causal_pairs(length, window) == seen.sum().item()


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "opt", "qwen3", "minicpm3", "bloom", "mpt"])
def test_forward_flops_equal_torchs_count(family):
    """Compare with torch's count, which includes the masked half of the attention matrix."""
    model = tiny_model(family)
    length = 24
    flops = FlopsModel.from_model(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(3, 3 + length)[None], use_cache=False)
    unseen = sum(length * length - causal_pairs(length, window) for window in flops.windows)
    counted = flops.forward([length]) + 4 * flops.attention_width * unseen
    # Some versions of transformers compute rotation angles with a small matrix product.
    assert counted == pytest.approx(counter.get_total_flops(), rel=5e-4)
    assert flops.train([length]) == 3 * flops.forward([length])


def test_tied_heads_count_once_and_idle_experts_do_not():
    tied = FlopsModel.from_model(tiny_model("qwen2", tie_word_embeddings=True))
    assert tied == FlopsModel.from_model(tiny_model("qwen2", tie_word_embeddings=False))
    two, four = (
        FlopsModel.from_model(tiny_model("qwen3_moe", num_experts_per_tok=k)) for k in (2, 4)
    )
    # layers, experts, matrices
    assert four.matrix_parameters - two.matrix_parameters == 2 * 2 * 3 * 32 * 16


def test_frozen_matrices_have_no_weight_gradient():
    """Compare adapters with torch's count of a forward and backward pass.

    The output of the embeddings needs no gradient, so the base matrices of the first layer compute
    none for it.
    """
    model = tiny_model("qwen2", num_hidden_layers=16)
    length = 24
    apply_lora(model, rank=4, alpha=8)
    flops = FlopsModel.from_model(model)
    adapters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert flops.matrix_parameters - flops.frozen_parameters == adapters
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(3, 3 + length)[None], use_cache=False).logits.sum().backward()
    unseen = 16 * (length * length - causal_pairs(length))
    counted = flops.train([length]) + 12 * flops.attention_width * unseen
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.03)
    assert counted < 0.85 * 3 * flops.forward([length])


def test_windows_are_read_per_layer():
    assert FlopsModel.from_model(tiny_model("gemma3")).windows == (8, None)
    assert FlopsModel.from_model(tiny_model("mistral")).windows == (8, 8)
    assert FlopsModel.from_model(tiny_model("llama").model).windows == (None, None)


def test_no_utilization_without_a_known_peak():
    assert model_flops_utilization(1e12, 1.0, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("name", "tera_flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100X", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_belongs_to_the_devices_own_model(name, tera_flops):
    peak = peak_bf16_flops(name)
    assert peak == (None if tera_flops is None else tera_flops * 1e12)
