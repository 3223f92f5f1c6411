"""Packed log-probs equal those of transformers' padded eager attention, and would differ if a
feature were dropped."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.rows import (
    RESPONSE_LENGTH,
    KeepFloat64,
    eager_log_probs,
    join_sequences,
    padded_rows,
)
from tests.tiny_models import ALIBI_FAMILIES, FAMILIES, LATENT_FAMILIES, MORE_FAMILIES, tiny_model
from verl.models import alibi, attention
from verl.models.attention import Facts, Layout, eager_attention
from verl.models.logprobs import Head
from verl.models.packed import PackedBatch, PackedCausalLM
from verl.utils.errors import ModelError

ALL = FAMILIES + MORE_FAMILIES
WINDOWED = ("mistral", "gemma2", "gemma3", "gpt_oss")


@pytest.fixture(scope="module")
def batch() -> PackedBatch:
    return PackedBatch.from_rows(*padded_rows(), RESPONSE_LENGTH)


def packed_log_probs(
    family: str, batch: PackedBatch, temperature: float = 1.0, **overrides: object
) -> dict[str, Tensor]:
    with torch.no_grad():
        return PackedCausalLM(tiny_model(family, **overrides))(
            batch, temperature=temperature, entropy=True
        )


def distance(family: str, batch: PackedBatch) -> float:
    expected, _ = eager_log_probs(family)
    return (packed_log_probs(family, batch)["log_probs"] - expected).abs().max().item()


@pytest.mark.parametrize("family", ALL)
def test_packed_log_probs_and_entropy_equal_padded_eager_ones(
    family: str, batch: PackedBatch
) -> None:
    expected, entropy = eager_log_probs(family)
    outputs = packed_log_probs(family, batch)
    assert outputs["log_probs"].dtype == torch.float32
    torch.testing.assert_close(outputs["log_probs"], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(outputs["entropy"], entropy, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "cohere"])
def test_temperature_divides_the_logits(family: str, batch: PackedBatch) -> None:
    expected, entropy = eager_log_probs(family, temperature=0.6)
    outputs = packed_log_probs(family, batch, temperature=0.6)
    torch.testing.assert_close(outputs["log_probs"], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(outputs["entropy"], entropy, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", ALL)
def test_float64_parity_is_exact_to_rounding(family: str, batch: PackedBatch) -> None:
    expected, _ = eager_log_probs(family, torch.float64)
    with KeepFloat64():
        ours = packed_log_probs(family, batch, dtype=torch.float64)["log_probs"]
    torch.testing.assert_close(ours, expected, atol=1e-10, rtol=0)


# name -> the families that have the feature, and a change of the facts of their layers
MUTATIONS: dict[str, tuple[Sequence[str], Callable[[Facts], Facts]]] = {
    "no window": (WINDOWED, lambda facts: facts._replace(window=None)),
    "a window one key too wide": (
        WINDOWED,
        lambda facts: facts._replace(window=facts.window + 1 if facts.window else None),
    ),
    "no cap": (["gemma2"], lambda facts: facts._replace(cap=None)),
    "no biases": (ALIBI_FAMILIES, lambda facts: facts._replace(bias=None)),
    "no sinks": (["gpt_oss"], lambda facts: facts._replace(sinks=None)),
}


def without_scaling(*arguments: object) -> Facts:
    facts = attention_facts(*arguments)
    usual = arguments[1] ** -0.5  # pyright: ignore
    return facts._replace(scale=1.0 if math.isclose(facts.scale, usual) else usual)


attention_facts = attention.layer_facts


@pytest.mark.parametrize(
    ("family", "mutation"),
    [(family, name) for name, (families, _) in MUTATIONS.items() for family in families],
)
def test_a_change_of_a_layers_facts_is_noticed(
    family: str, mutation: str, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, change = MUTATIONS[mutation]
    monkeypatch.setattr(attention, "layer_facts", lambda *given: change(attention_facts(*given)))
    assert distance(family, batch) > 1e-2


@pytest.mark.parametrize("family", ALIBI_FAMILIES)
def test_biases_of_another_head_are_noticed(
    family: str, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    slopes = alibi.alibi_slopes
    monkeypatch.setattr(alibi, "alibi_slopes", lambda *given: slopes(*given).flip(0))
    assert distance(family, batch) > 1e-2


@pytest.mark.parametrize("family", ALL)
def test_dropping_the_scaling_is_noticed(
    family: str, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "layer_facts", without_scaling)
    assert distance(family, batch) > 1e-2


@pytest.mark.parametrize("family", ALL)
def test_dropping_sequence_isolation_is_noticed(
    family: str, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    join_sequences(monkeypatch)
    assert distance(family, batch) > 1e-2


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_dropping_the_position_reset_is_noticed(family: str, batch: PackedBatch) -> None:
    # Learned positions. Rotary ones are relative: without a reset, their scores stay the same.
    running = replace(batch, position_ids=torch.arange(len(batch.position_ids)).clamp(max=255))
    assert distance(family, running) > 1e-2


@pytest.mark.parametrize("family", [name for name in ALL if name not in ALIBI_FAMILIES])
def test_dropping_the_positions_is_noticed(family: str, batch: PackedBatch) -> None:
    assert (
        distance(family, replace(batch, position_ids=torch.zeros_like(batch.position_ids))) > 1e-2
    )


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_kernels_of_one_head_size_get_values_as_wide_as_keys(
    family: str, batch: PackedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pad values: the CUDA kernels take one head size, and these families have narrower values."""
    widths = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, layout: Layout, facts: Any, name: str) -> Tensor:
        widths.append((q.shape[-1], k.shape[-1], v.shape[-1]))
        return attention.block_attention(q, k, v, layout, facts)

    monkeypatch.setattr(attention, "varlen_can", lambda *arguments: True)
    monkeypatch.setattr(attention, "_varlen_attention", kernel)
    assert distance(family, batch) <= 1e-4
    assert set(widths) == {(10, 10, 10)}


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite"])
def test_dropping_the_head_scale_and_cap_is_noticed(family: str, batch: PackedBatch) -> None:
    module = PackedCausalLM(tiny_model(family))
    module.head = Head()
    with torch.no_grad():
        ours = module(batch)["log_probs"]
    assert (ours - eager_log_probs(family)[0]).abs().max() > 1e-2


def test_two_models_in_one_process_keep_their_own_batch(batch: PackedBatch) -> None:
    class Nested(torch.nn.Module):
        """Runs another packed model in the middle of a forward pass."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, module: object, arguments: object) -> None:
            small = PackedBatch.from_sequences([[5, 6, 7], [8, 9]])
            self.inner(small)

    outer = PackedCausalLM(tiny_model("qwen2"))
    inner = PackedCausalLM(tiny_model("mistral"))
    outer.model.model.layers[1].register_forward_pre_hook(Nested(inner).forward)
    with torch.no_grad():
        ours = outer(batch)["log_probs"]
    torch.testing.assert_close(ours, eager_log_probs("qwen2")[0], atol=1e-4, rtol=0)


def test_a_copy_of_a_model_has_its_own_slot(batch: PackedBatch) -> None:
    module = PackedCausalLM(tiny_model("qwen2"))
    twin = copy.deepcopy(module)
    assert twin.slot is not module.slot
    assert twin.model.model.layers[0].self_attn.verl_packing is twin.slot
    with torch.no_grad():
        assert torch.equal(twin(batch)["log_probs"], module(batch)["log_probs"])


def test_attention_outside_a_packed_forward_is_an_error_and_can_be_switched() -> None:
    model = tiny_model("qwen2")
    ids = torch.tensor([[5, 6, 7]])
    expected = model(ids).logits
    PackedCausalLM(model)
    with pytest.raises(ModelError, match="outside a packed forward"):
        model(ids)
    with eager_attention(model):
        assert torch.equal(model(ids).logits, expected)
    assert model.config._attn_implementation == attention.IMPLEMENTATION


def test_dropout_is_rejected_and_not_ignored(batch: PackedBatch) -> None:
    module = PackedCausalLM(tiny_model("llama", attention_dropout=0.1)).train()
    with pytest.raises(ModelError, match="dropout"):
        module(batch)
