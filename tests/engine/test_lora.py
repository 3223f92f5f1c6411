"""The engine with adapters: sharded and plain, saved for peft, resumed bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.diagnostics.live_bytes import taken_by
from tests.engine.batches import COLUMNS, gradients_of, make_batch, smooth_loss
from tests.engine.test_state import value_loss
from tests.tiny_models import tiny_model, tiny_tokenizer
from verl.config import FSDPConfig, OptimConfig
from verl.distributed.mesh import close_process_group
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.critic import CriticModel
from verl.models.lora import adapters_off, apply_lora
from verl.models.packed import PackedCausalLM, PackedValueModel
from verl.rollout.eight_bits import EightBitLinear, quantize
from verl.rollout.twin import ModelTwin
from verl.utils.errors import CheckpointError
from verl.weight_sync import FingerprintLog, fingerprint

SHAPES = [(5, 9), (2, 3), (12, 10), (7, 1)]
BUDGET = TokenBudget(rows=2)
TARGETS = ["q_proj", "o_proj"]


@pytest.fixture(autouse=True)
def process_group():
    yield
    close_process_group()


def make_engine(
    family: str = "qwen2",
    *,
    rank: int = 4,
    critic: bool = False,
    dtype=torch.float32,
    model_settings=None,
    value_head: torch.nn.Module | None = None,
    **settings,
) -> TrainEngine:
    model = tiny_model(family, dtype=dtype, **(model_settings or {}))
    model.name_or_path = "some/base"
    module = CriticModel.from_causal_lm(model) if critic else model
    if value_head is not None:
        module.value_head = value_head

    if rank:
        targets = TARGETS if family == "qwen3_moe" else "all-linear"
        apply_lora(module.body if critic else model, rank=rank, alpha=8, target_modules=targets)

    return TrainEngine(
        PackedValueModel(module) if critic else PackedCausalLM(module),
        EngineOptions(
            device=torch.device("cpu"),
            optim=OptimConfig(lr=1e-2, warmup_style="cosine", lr_warmup_steps=2),
            grad_clip=1.0,
            **settings,
        ),
        total_steps=8,
    )


def train(engine: TrainEngine, first: int, count: int) -> list[float]:
    loss_fn = value_loss if isinstance(engine.module, PackedValueModel) else smooth_loss
    seen = []
    for number in range(first, first + count):
        engine.forward_backward(make_batch(SHAPES, seed=number), BUDGET, loss_fn, COLUMNS)
        seen.append(engine.step().grad_norm)
        engine.step_schedule()
    return seen


def trained_tensors(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in engine.module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"family": "gpt2"},
        {"family": "qwen3_moe"},
        {"critic": True, "family": "llama"},
        {"shard": True},
    ],
    ids=["qwen2", "gpt2", "qwen3_moe", "critic", "sharded"],
)
def test_reload_after_three_steps_continues_exactly(tmp_path: Path, settings):
    whole, first, second = (make_engine(**settings) for _ in range(3))
    undisturbed = train(whole, 0, 5)
    before = train(first, 0, 3)
    first.save(tmp_path)
    train(second, 50, 2)
    second.load(tmp_path)
    assert before + train(second, 3, 2) == undisturbed
    expected = trained_tensors(whole)
    for name, tensor in trained_tensors(second).items():
        assert torch.equal(tensor, expected[name]), name
    assert not (tmp_path / "huggingface").exists()


@pytest.mark.parametrize(
    "settings", [{}, {"enable_gradient_checkpointing": True}], ids=["plain", "checkpointing"]
)
def test_mesh_of_one_trains_like_no_mesh(settings):
    plain = make_engine(**settings)
    sharded = make_engine(shard=True, **settings)
    batch = make_batch(SHAPES)

    # A first evaluation without adapters must not stop FSDP2 from training them.
    for engine in (plain, sharded):
        with adapters_off(engine.hf_model):
            engine.infer(batch, BUDGET)

    assert train(sharded, 0, 3) == pytest.approx(train(plain, 0, 3), rel=1e-5)
    named = dict(sharded.parameters_for_rollout())
    expected = dict(plain.parameters_for_rollout())
    assert (
        list(named)
        == list(expected)
        == [name for name, _ in tiny_model("qwen2").named_parameters()]
    )

    for name, tensor in named.items():
        assert not isinstance(tensor, DTensor)
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-4)


def test_frozen_bf16_weights_with_fp32_adapters_on_a_mesh():
    engine = make_engine(
        dtype=torch.bfloat16,
        shard=True,
        fsdp_config=FSDPConfig(compute_dtype="bfloat16"),
        enable_gradient_checkpointing=True,
    )
    before = {
        name: p.detach().clone()
        for name, p in engine.module.named_parameters()
        if not p.requires_grad
    }

    train(engine, 0, 2)
    engine.forward_backward(make_batch(SHAPES), BUDGET, smooth_loss, COLUMNS)
    assert all(gradient.dtype == torch.float32 for gradient in gradients_of(engine).values())

    for name, parameter in engine.module.named_parameters():
        if name in before:
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(parameter.detach().full_tensor(), before[name].full_tensor())
        else:
            assert parameter.dtype == torch.float32


def test_peft_loads_the_adapters(tmp_path: Path):
    engine = make_engine()
    train(engine, 0, 4)
    engine.save(tmp_path, tokenizer=tiny_tokenizer())
    folder = tmp_path / "lora_adapter"
    assert sorted(file.name for file in folder.glob("adapter*")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]

    assert (folder / "tokenizer.json").is_file()
    loaded = PeftModel.from_pretrained(tiny_model("qwen2"), folder)
    assert loaded.peft_config["default"].base_model_name_or_path == "some/base"
    batch = make_batch([(5, 30)])
    ours = engine.infer(batch, BUDGET)["log_probs"][0]
    ids = batch.batch["input_ids"]

    with torch.no_grad():
        theirs = (
            loaded(input_ids=ids).logits[0, 4:-1].log_softmax(-1).gather(1, ids[0, 5:, None])[:, 0]
        )
        base = (
            tiny_model("qwen2")(input_ids=ids)
            .logits[0, 4:-1]
            .log_softmax(-1)
            .gather(1, ids[0, 5:, None])[:, 0]
        )

    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (ours - base).abs().max() > 0.1


@pytest.mark.parametrize("tied", [False, True])
def test_merged_weights_are_saved_on_request(tmp_path: Path, tied: bool):
    engine = make_engine(model_settings={"tie_word_embeddings": tied})
    train(engine, 0, 3)
    engine.save(tmp_path, merged=True)
    assert (tmp_path / "lora_adapter").is_dir()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface", dtype="auto")
    saved = dict(model.named_parameters())
    expected = dict(engine.parameters_for_rollout())
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())


def test_checkpoint_with_other_adapters_is_an_error(tmp_path: Path):
    make_engine().save(tmp_path / "lora")
    make_engine(rank=0).save(tmp_path / "full")
    make_engine(critic=True, family="llama").save(tmp_path / "critic")
    with pytest.raises(CheckpointError, match="saved by a LoRA run.*Set lora_rank"):
        make_engine(rank=0).load(tmp_path / "lora")
    with pytest.raises(CheckpointError, match="Expected the adapters of a LoRA run"):
        make_engine().load(tmp_path / "full")
    with pytest.raises(CheckpointError, match="does not match the adapters.*Set lora_rank"):
        make_engine(rank=2).load(tmp_path / "lora")
    (tmp_path / "critic" / "lora_adapter" / "value_head.safetensors").unlink()
    with pytest.raises(CheckpointError, match="not a critic"):
        make_engine(critic=True, family="llama").load(tmp_path / "critic")


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
@pytest.mark.parametrize("rank", [0, 4])
def test_a_sharded_critic_trains_without_a_warning_of_torch(rank: int):
    assert train(make_engine(critic=True, family="llama", rank=rank, shard=True), 0, 1)[0] > 0


@pytest.mark.parametrize("bias", [False, True])
def test_checkpoint_of_another_value_head_is_an_error(tmp_path: Path, bias: bool):
    saved = torch.nn.Linear(32, 1, bias=bias)
    make_engine(critic=True, family="llama", value_head=saved).save(tmp_path)
    own = torch.nn.Linear(32, 1, bias=not bias)
    engine = make_engine(critic=True, family="llama", value_head=own)

    with pytest.raises(CheckpointError, match=r"Expected a value head .*custom_cls"):
        engine.load(tmp_path, optimizer=False)


@pytest.mark.parametrize("proved", [False, True])
def test_weight_transfer_merges_one_weight_at_a_time(proved: bool):
    """Hold no more than the largest of the adapted matrices in fp32, and its copy for the check."""
    size = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
    engine = make_engine(dtype=torch.bfloat16, model_settings=size)
    model: Any = engine.hf_model
    twin = ModelTwin(model, attention="eager", dtype=torch.bfloat16, device=torch.device("cpu"))
    there = [
        part
        for module in (model, twin.module)
        for part in (*module.parameters(), *module.buffers())
    ]

    log = FingerprintLog() if proved else None
    there.append(fingerprint._hashes())  # a table that every fingerprint reads
    taken = taken_by(
        lambda: twin.update(engine.parameters_for_rollout(dtype=torch.bfloat16, log=log)), there
    )
    assert taken <= (8 if proved else 4) * 256 * 1024


def test_a_rollout_in_eight_bits_rounds_merged_weights():
    size = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    engine = make_engine(dtype=torch.bfloat16, model_settings=size)
    model: Any = engine.hf_model
    twin = ModelTwin(
        model,
        attention="eager",
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        quantization="fp8",
    )
    before = {name: part.rows.wide() for name, part in _eight_bit_layers(twin)}
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)

    merged = {}
    for name, tensor in engine.parameters_for_rollout(dtype=torch.bfloat16):
        merged[name] = tensor.clone()
    twin.update(merged.items())
    for name, part in _eight_bit_layers(twin):
        assert torch.equal(part.rows.wide(), quantize(merged[f"{name}.weight"].bfloat16()).wide())
        assert not torch.equal(part.rows.wide(), before[name])


def _eight_bit_layers(twin: ModelTwin) -> list[tuple[str, EightBitLinear]]:
    found = []
    for name, part in twin.module.named_modules():
        if isinstance(part, EightBitLinear):
            found.append((name, part))
    assert found
    return found
