"""Gradients do not depend on packing or checkpointing."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.models.rows import RESPONSE_LENGTH, KeepFloat64, padded_rows
from tests.tiny_models import FAMILIES, MORE_FAMILIES, tiny_model
from verl.models import attention
from verl.models.attention import apply_checkpointing
from verl.models.packed import PackedBatch, PackedCausalLM

PACKINGS = {
    "one": [[0, 1, 2, 3, 4, 5]],
    "rows": [[0], [1], [2], [4], [5], [3]],
    "mixed": [[5, 1], [3, 0], [4, 2]],
}


def loss_of(module: PackedCausalLM, rows: list[int]) -> Tensor:
    ids, mask = padded_rows()
    outputs = module(PackedBatch.from_rows(ids[rows], mask[rows], RESPONSE_LENGTH), entropy=True)
    # A different weight for each token, so that packing cannot mix them up.
    response = mask[rows, -RESPONSE_LENGTH:].bool()
    weights = (ids[rows, -RESPONSE_LENGTH:][response] % 7 - 3).to(outputs["log_probs"].dtype)
    return (weights * outputs["log_probs"]).sum() + 0.1 * outputs["entropy"].sum()


def gradients(
    module: PackedCausalLM, packing: list[list[int]], exact: bool = False
) -> dict[str, Tensor]:
    """Return gradients summed over the packs.

    `exact` keeps float64 where transformers would cast (not under checkpointing: its recompute runs
    outside the mode).
    """
    module.zero_grad()
    with KeepFloat64() if exact else nullcontext():
        for rows in packing:
            loss_of(module, rows).backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def assert_gradients_equal(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float
) -> None:
    assert ours.keys() == theirs.keys()
    total = sum(value.norm() ** 2 for value in theirs.values()) ** 0.5
    for name, value in theirs.items():
        # The floor is for gradients that are 0 in exact arithmetic, such as those of a key bias
        # without rotary positions.
        allowed = tolerance * value.norm() + 1e-3 * tolerance * total
        assert (ours[name] - value).norm() <= allowed, (
            name,
            float((ours[name] - value).norm() / value.norm()),
        )


@pytest.mark.parametrize("family", FAMILIES + MORE_FAMILIES)
def test_gradients_do_not_depend_on_packing(family: str) -> None:
    module = PackedCausalLM(tiny_model(family, dtype=torch.float64))
    expected = gradients(module, PACKINGS["one"], exact=True)
    assert all(bool(value.isfinite().all()) for value in expected.values())
    for name in ("rows", "mixed"):
        assert_gradients_equal(gradients(module, PACKINGS[name], exact=True), expected, 1e-9)


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "gemma2", "gpt_oss"])
def test_gradients_do_not_depend_on_packing_in_fp32(family: str) -> None:
    module = PackedCausalLM(tiny_model(family))
    assert_gradients_equal(
        gradients(module, PACKINGS["rows"]), gradients(module, PACKINGS["one"]), 1e-5
    )


@pytest.mark.parametrize(
    "family",
    [
        "opt",
        "qwen2",
        "gemma2",
        "qwen3_moe",
        "gpt_oss",
        "deepseek_v2",
        "deepseek_v3",
        "bloom",
        "mpt",
    ],
)
def test_gradients_equal_those_of_padded_eager_attention(family: str) -> None:
    ids, mask = padded_rows()
    eager = tiny_model(family, dtype=torch.float64)
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    with KeepFloat64():
        logits = eager(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits

    dense = logits.log_softmax(-1)[:, -RESPONSE_LENGTH - 1 : -1]
    response = mask[:, -RESPONSE_LENGTH:].bool()
    targets = ids[:, -RESPONSE_LENGTH:]
    log_probs = dense.gather(-1, targets[..., None]).squeeze(-1)[response]
    entropy = -(dense.exp() * dense).sum(-1)[response]
    (((targets[response] % 7 - 3) * log_probs).sum() + 0.1 * entropy.sum()).backward()
    expected = {
        f"model.{name}": value.grad
        for name, value in eager.named_parameters()
        if value.grad is not None
    }

    ours = gradients(
        PackedCausalLM(tiny_model(family, dtype=torch.float64)), PACKINGS["mixed"], exact=True
    )
    assert_gradients_equal(ours, expected, 1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_does_not_change_gradients(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_attention_calls(monkeypatch)
    module = PackedCausalLM(tiny_model(family, dtype=torch.float64)).train()
    expected = gradients(module, PACKINGS["mixed"])
    plain = len(calls)
    apply_checkpointing(module.model)
    assert_gradients_equal(gradients(module, PACKINGS["mixed"]), expected, 1e-12)
    assert len(calls) == 3 * plain  # plain forward, forward, recompute


def test_a_fraction_of_the_layers_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_attention_calls(monkeypatch)
    module = PackedCausalLM(tiny_model("qwen2", dtype=torch.float64, num_hidden_layers=4)).train()
    expected = gradients(module, PACKINGS["mixed"])
    plain = len(calls)
    apply_checkpointing(module.model, share=0.3)  # two of four
    assert_gradients_equal(gradients(module, PACKINGS["mixed"]), expected, 1e-12)
    assert len(calls) == plain * 2.5


def test_recompute_sees_its_own_batch_after_other_batches() -> None:
    module = PackedCausalLM(tiny_model("qwen2", dtype=torch.float64)).train()
    expected = gradients(module, PACKINGS["mixed"])
    apply_checkpointing(module.model)
    module.zero_grad()
    losses = [loss_of(module, rows) for rows in PACKINGS["mixed"]]
    for loss in losses:
        loss.backward()
    ours = {
        name: parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    assert_gradients_equal(ours, expected, 1e-12)


def test_a_kept_graph_recomputes_twice() -> None:
    module = PackedCausalLM(tiny_model("gemma2", dtype=torch.float64)).train()
    apply_checkpointing(module.model)
    loss = loss_of(module, [0, 1, 2])
    loss.backward(retain_graph=True)
    once = {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    loss.backward()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, 2 * once[name])


def test_a_whole_model_inside_a_users_checkpoint_works() -> None:
    module = PackedCausalLM(tiny_model("mistral", dtype=torch.float64)).train()
    expected = gradients(module, PACKINGS["one"])
    module.zero_grad()
    checkpoint(loss_of, module, PACKINGS["one"][0], use_reentrant=False).backward()  # pyright: ignore
    ours = {
        name: parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    assert_gradients_equal(ours, expected, 1e-12)


def count_attention_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    read = attention.layer_facts

    def counted(*arguments: object) -> attention.Facts:
        calls.append("call")
        return read(*arguments)

    monkeypatch.setattr(attention, "layer_facts", counted)
    return calls
