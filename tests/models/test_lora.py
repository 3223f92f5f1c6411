"""Adapters: their results, the equivalent merged weights, and the modules that can have them."""

import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.tiny_models import FAMILIES, tiny_model
from tests.tiny_vision_models import FAMILIES as VISION_FAMILIES
from tests.tiny_vision_models import tiny_vision_model
from verl.models.load import TOY, load_causal_lm
from verl.models.lora import (
    adapted_layers,
    adapters_off,
    apply_lora,
    load_adapters,
    merged_parameters,
    plain_modules,
    read_adapters,
)
from verl.models.packed import PackedBatch, PackedCausalLM
from verl.models.vision import text_body
from verl.utils.errors import CheckpointError, ModelError

EXPERTS = ("qwen3_moe", "gpt_oss")
ATTENTION = ["q_proj", "v_proj"]
IDS = torch.arange(3, 40)[None]


def adapted(family: str, *, trained: bool = True, **settings):
    """Return a tiny model with adapters; B is random, as if it had been trained."""
    model = tiny_model(family, **settings)
    apply_lora(
        model, rank=4, alpha=8, target_modules=ATTENTION if family in EXPERTS else "all-linear"
    )
    if trained:
        draw = torch.Generator().manual_seed(1)
        for layer in adapted_layers(model).values():
            weight = layer.lora_B["default"].weight
            weight.data = torch.randn(weight.shape, generator=draw, dtype=torch.float64).to(
                weight.dtype
            )
    return model


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_merged_weights_give_the_adapted_model(family: str):
    model = adapted(family)
    plain = tiny_model(family)
    merged = dict(merged_parameters(model))
    assert list(merged) == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in plain_modules(model)] == [name for name, _ in plain.named_modules()]
    before = plain(IDS).logits
    for name, parameter in plain.named_parameters():
        parameter.copy_(merged[name])
    assert relative(plain(IDS).logits, model(IDS).logits) < 1e-5
    assert relative(before, model(IDS).logits) > 0.1, "adapters that do something"
    with adapters_off(model):
        assert torch.equal(model(IDS).logits, before)


@torch.no_grad()
def test_latent_projections_take_adapters():
    model = tiny_model("deepseek_v3")
    plain = tiny_model("deepseek_v3")
    names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
    apply_lora(model, rank=4, alpha=8, target_modules=names)
    layers = adapted_layers(model)
    assert sorted({name.rpartition(".")[2] for name in layers}) == sorted(names)
    for layer in layers.values():
        layer.lora_B["default"].weight.normal_()
    merged = dict(merged_parameters(model))
    for name, parameter in plain.named_parameters():
        parameter.copy_(merged[name])
    assert relative(plain(IDS).logits, model(IDS).logits) < 1e-4


def test_merging_is_an_fp32_sum_that_changes_nothing():
    model = adapted("qwen2", dtype=torch.bfloat16)
    name, layer = next(iter(adapted_layers(model).items()))
    base = layer.base_layer.weight
    before = base.detach().clone()
    merged = dict(merged_parameters(model))[f"{name}.weight"]
    delta = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged.double(), base.double() + 8 / 4 * delta, rtol=1e-5, atol=1e-5)
    assert torch.equal(base, before)


def test_a_new_adapter_changes_no_bit_and_is_the_same_in_every_process():
    torch.manual_seed(3)
    one = adapted("qwen2", trained=False)
    torch.manual_seed(4)
    other = adapted("qwen2", trained=False)
    assert torch.equal(one(IDS).logits, tiny_model("qwen2")(IDS).logits)
    for (name, left), (_, right) in zip(one.named_parameters(), other.named_parameters()):
        assert torch.equal(left, right), name


def test_only_adapters_are_trained_and_they_are_fp32():
    model = adapted("llama", dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        factor = ".lora_" in name
        assert parameter.requires_grad == factor, name
        assert parameter.dtype == (torch.float32 if factor else torch.bfloat16), name


def test_gradients_equal_those_of_peft():
    """Compare packed sequences, with our attention and head, with peft's own model on one sequence
    at a time."""
    ours = adapted("qwen2", dtype=torch.float64)
    theirs = get_peft_model(
        tiny_model("qwen2", dtype=torch.float64),
        LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"),
    )
    theirs.load_state_dict(
        {f"base_model.model.{name}": value for name, value in ours.state_dict().items()}
    )

    sequences = [
        [3 + (7 * i + row) % 120 for i in range(length)]
        for row, length in enumerate((5, 19, 2, 33))
    ]
    loss = PackedCausalLM(ours)(PackedBatch.from_sequences(sequences))["log_probs"].sum()
    loss.backward()
    expected = torch.zeros((), dtype=torch.float64)

    for sequence in sequences:
        ids = torch.tensor([sequence])
        log_probs = theirs(input_ids=ids).logits[0, :-1].log_softmax(-1)
        expected = expected + log_probs.gather(1, ids[0, 1:, None]).sum()

    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    gradients = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    reference = {
        name.removeprefix("base_model.model."): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }

    assert gradients.keys() == reference.keys()
    for name, gradient in gradients.items():
        assert relative(gradient, reference[name]) < 1e-4, name


@pytest.mark.parametrize(
    ("family", "targets", "message"),
    [
        ("qwen2", ["q_prj"], "no module named 'q_prj'. Nearest: q_proj"),
        ("qwen2", "q_proj", r"regular expression for whole names.*the list \[q_proj\]"),
        ("qwen2", "(", "not a regular expression"),
        ("qwen2", ["lm_head"], "'lm_head' of 'qwen2' is the head"),
        ("qwen2", ["embed_tokens"], "is Embedding. Only linear layers can have adapters"),
        ("qwen2", ["self_attn"], "is Qwen2Attention"),
        (
            "qwen3_moe",
            "all-linear",
            r"stacks of matrices.*Set section.target_modules=\[k_proj,o_proj,q_proj,v_proj\]",
        ),
        ("gpt_oss", ["experts"], "a stack of experts"),
        ("qwen3_moe", ["gate_up_proj"], "no module named 'gate_up_proj'"),
    ],
)
def test_modules_without_adapter_support_are_named(family: str, targets, message: str):
    with pytest.raises(ModelError, match=message):
        apply_lora(tiny_model(family), rank=4, alpha=8, target_modules=targets, section="section")


def test_adapters_that_peft_wrote_are_read(tmp_path: Path):
    theirs = get_peft_model(
        tiny_model("qwen2"), LoraConfig(r=4, lora_alpha=8, target_modules=ATTENTION)
    )
    theirs.save_pretrained(tmp_path)
    config, factors = read_adapters(tmp_path)
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert factors.keys() == adapted_layers(theirs.base_model.model).keys()


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"use_rslora": True}, "use_rslora=True"),
        ({"use_dora": True}, "use_dora=True"),
        ({"alpha_pattern": {"q_proj": 32}}, "alpha_pattern={'q_proj': 32}"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern={'q_proj': 2}"),
        ({"modules_to_save": ["lm_head"]}, "the tensor 'lm_head.weight'"),
    ],
)
def test_adapters_with_other_updates_are_refused(tmp_path: Path, settings: dict, found: str):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=ATTENTION, **settings)
    get_peft_model(tiny_model("qwen2"), config).save_pretrained(tmp_path)
    message = rf"found {re.escape(found)}\. Merge them into their model by peft"
    with pytest.raises(CheckpointError, match=message):
        read_adapters(tmp_path)

    model = tiny_model("qwen2")
    apply_lora(model, rank=4, alpha=8, target_modules=ATTENTION)
    with pytest.raises(CheckpointError, match=message):
        load_adapters(tmp_path, model)


def test_targets_match_the_configuration():
    def chosen(targets, excluded=None) -> set[str]:
        model = tiny_model("qwen2")
        apply_lora(model, rank=2, alpha=2, target_modules=targets, exclude_modules=excluded)
        return {name.removeprefix("model.layers.") for name in adapted_layers(model)}

    both = {"0.self_attn.q_proj", "0.self_attn.v_proj", "1.self_attn.q_proj", "1.self_attn.v_proj"}
    assert chosen(ATTENTION) == both
    assert chosen(r".*\.1\..*\.(q|v)_proj") == {"1.self_attn.q_proj", "1.self_attn.v_proj"}
    assert chosen(ATTENTION, ["layers.0.self_attn.v_proj"]) == both - {"0.self_attn.v_proj"}
    assert len(chosen("all-linear")) == 14
    with pytest.raises(ModelError, match="exclude_modules: the model has no module named 'v_prj'"):
        chosen(ATTENTION, ["v_prj"])
    with pytest.raises(ModelError, match="leaves no module"):
        chosen(ATTENTION, ["self_attn.q_proj", "self_attn.v_proj"])


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_all_linear_leaves_the_vision_tower_out(family: str):
    model = tiny_vision_model(family)
    apply_lora(model, rank=4, alpha=8)
    layers = list(adapted_layers(model).values())
    assert layers
    of_text = set(text_body(model).modules())
    assert all(layer in of_text for layer in layers)


def test_adapters_come_after_the_check_at_load_and_before_packing():
    """Follow the order of the worker: prepare for packing at load, wrap, and prepare again."""
    model = load_causal_lm(TOY, dtype=torch.float32)
    batch = PackedBatch.from_sequences([[7, 8, 9, 10], [11, 12, 13]])
    before = PackedCausalLM(model)(batch)["log_probs"]
    apply_lora(model, rank=4, alpha=8)
    assert torch.equal(PackedCausalLM(model)(batch)["log_probs"], before)


@pytest.mark.parametrize("name", ["proj", "0"])
def test_the_names_that_an_error_proposes_select_linear_layers(name: str) -> None:
    model = tiny_vision_model("qwen2_5_vl")
    with pytest.raises(ModelError, match=r"Only linear layers can have adapters") as raised:
        apply_lora(model, rank=2, alpha=2, target_modules=["q_proj", name])
    proposed = str(raised.value).rpartition("target_modules=[")[2].removesuffix("].").split(",")
    assert {"q_proj", "qkv", "attn.proj", "mlp.0", "mlp.2"} < set(proposed)
    apply_lora(model, rank=2, alpha=2, target_modules=proposed)


def test_a_frozen_tower_gets_no_adapters() -> None:
    model = tiny_vision_model("gemma3")
    with pytest.raises(ModelError, match=r"target_modules: 'fc1' selects layers of the vision tow"):
        apply_lora(model, rank=2, alpha=2, target_modules=["q_proj", "fc1"], freezes_tower=True)
    with pytest.raises(ModelError, match=r"'.*vision.*fc1' selects layers of the vision tower al"):
        apply_lora(model, rank=2, alpha=2, target_modules=".*vision.*fc1", freezes_tower=True)
    apply_lora(model, rank=2, alpha=2, target_modules=["q_proj"], freezes_tower=True)
    adapted = list(adapted_layers(model))
    assert adapted
    assert not any("vision" in name for name in adapted)
