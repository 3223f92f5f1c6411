"""Predicted memory of an engine against a real one, counted tensor by tensor on a CPU."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.diagnostics.live_bytes import LiveBytes, taken_by
from tests.engine.batches import COLUMNS, make_batch, smooth_loss
from tests.tiny_models import tiny_model
from verl.config import FSDPConfig, OptimConfig
from verl.distributed.mesh import close_process_group
from verl.engine.base import TrainEngine
from verl.engine.engine_setup import gathers_once
from verl.engine.footprint import EngineFootprint
from verl.engine.microbatch import TokenBudget
from verl.engine.model_shape import ModelShape
from verl.engine.options import EngineOptions
from verl.models.lora import apply_lora
from verl.models.packed import PackedCausalLM

SHAPES = [(8, 120)] * 4
TOKENS = 256
PREDICTIONS = 240
BUDGET = TokenBudget(max_tokens=TOKENS)
BF16 = FSDPConfig(compute_dtype="bfloat16")


@pytest.fixture(autouse=True)
def process_group():
    yield
    close_process_group()


def make_engine(
    *, optimizer: str = "AdamW", tied: bool = False, lora: int = 0, family="qwen2", **settings
):
    model = tiny_model(
        family,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        vocab_size=512,
        tie_word_embeddings=tied,
        max_position_embeddings=512,
    )
    if lora:
        apply_lora(model, rank=lora, alpha=lora)

    options = EngineOptions(
        device=torch.device("cpu"),
        optim=OptimConfig(optimizer=optimizer),
        grad_clip=1.0,
        share_prompts=False,
        **settings,
    )
    return TrainEngine(PackedCausalLM(model), options, total_steps=5)


def update(engine: TrainEngine) -> None:
    engine.forward_backward(make_batch(SHAPES), BUDGET, smooth_loss, COLUMNS)


def num_bytes(tensors) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({part.untyped_storage(): part.untyped_storage().nbytes() for part in local}.values())


def moments(engine: TrainEngine) -> list[torch.Tensor]:
    assert engine.optimizer is not None
    return [value for state in engine.optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tied": True},
        {"family": "qwen3_moe"},
        {"lora": 4},
        {"optimizer": "Muon"},
        {"fsdp_config": BF16},
    ],
    ids=["whole", "tied", "experts", "LoRA", "Muon", "sharded"],
)
def test_resident_memory_is_predicted_exactly(settings):
    engine = make_engine(**settings)
    footprint = engine.footprint
    assert num_bytes(engine.module.parameters()) == footprint.parameters
    update(engine)
    gradients = [weight.grad for weight in engine.module.parameters() if weight.grad is not None]
    assert (
        sum(gradient.numel() * gradient.itemsize for gradient in gradients) == footprint.gradients
    )
    engine.step()
    assert num_bytes(moments(engine)) == footprint.moments > 0
    assert footprint.resident == footprint.parameters + footprint.moments


@pytest.mark.parametrize(
    "settings",
    [
        {"fsdp_config": BF16},
        {"fsdp_config": BF16, "enable_gradient_checkpointing": True},
        {"fsdp_config": replace(BF16, reshard_after_forward=False)},
    ],
    ids=["all kept", "recomputed", "gathered once"],
)
def test_peak_memory_of_passes_is_predicted(settings):
    """Compare passes in bf16 with FSDP2 and uncompiled layers."""
    engine = make_engine(**settings)
    update(engine)
    engine.step()
    there = [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for tensor in (*engine.module.parameters(), *moments(engine))
    ]
    taken = taken_by(lambda: update(engine), there)

    assert sum(engine.footprint.update(TOKENS, PREDICTIONS).values()) == pytest.approx(
        taken, rel=0.05
    )
    engine.optimizer.zero_grad()
    taken = taken_by(lambda: engine.infer(make_batch(SHAPES), BUDGET), there)
    assert sum(engine.footprint.forward(TOKENS, PREDICTIONS).values()) == pytest.approx(
        taken, rel=0.1
    )


def test_meter_counts_live_tensors():
    meter = LiveBytes()
    meter.start()
    with meter:
        one = torch.ones(1000)
        other = one + 1
        view = other[:10]
        del one
        kept = torch.ones(10)
    assert meter.taken() == 8000
    assert meter.now == 4040
    assert len(view) == len(kept) == 10


def test_memory_grows_with_each_size():
    footprint = make_engine().footprint
    shape = footprint.shape
    setup = replace(footprint.setup, on_cuda=True, shards=True, compute_itemsize=2)
    tokens = [
        sum(EngineFootprint(shape, setup).update(count, count).values())
        for count in (64, 128, 4096)
    ]
    assert tokens == sorted(set(tokens))

    deeper = replace(shape, layers=6)
    for share in (0.0, 0.5, 1.0):
        one, other = (
            sum(
                EngineFootprint(each, replace(setup, checkpointing_share=share))
                .update(4096, 4096)
                .values()
            )
            for each in (shape, deeper)
        )
        assert one < other

    shares = [
        sum(
            EngineFootprint(deeper, replace(setup, checkpointing_share=share))
            .update(4096, 4096)
            .values()
        )
        for share in (0.0, 0.5, 1.0)
    ]
    assert shares == sorted(shares, reverse=True)

    assert EngineFootprint(shape, replace(setup, compiled=True)).layer_activations() < (
        EngineFootprint(shape, replace(setup, compiled=False)).layer_activations()
    )


def test_logit_memory_is_independent_of_the_vocabulary():
    footprint = make_engine().footprint
    setup = replace(footprint.setup, on_cuda=True, shards=True, compute_itemsize=2)
    small, large = (
        EngineFootprint(replace(footprint.shape, vocabulary=vocabulary), setup).forward(
            16_384, 16_384
        )
        for vocabulary in (32_768, 262_144)
    )
    assert sum(small.values()) == pytest.approx(sum(large.values()), rel=0.1)


def test_weights_stay_gathered_on_a_large_device():
    footprint = make_engine().footprint
    setup = replace(footprint.setup, on_cuda=True, shards=True, compute_itemsize=2)
    needed = footprint.shape.numel * (2 + 4 * 4)
    for device_bytes, expected in ((2 * needed, True), (2 * needed - 4, False), (None, False)):
        assert (
            gathers_once(footprint.shape, setup, FSDPConfig(), device_bytes).keeps_gathered
            is expected
        )
    ranks = replace(setup, shard_ranks=2)
    assert not gathers_once(footprint.shape, ranks, FSDPConfig(), 2 * needed).keeps_gathered


def test_critic_has_no_vocabulary():
    from verl.models.critic import CriticModel

    shape = ModelShape.from_module(CriticModel.from_causal_lm(tiny_model("llama")))
    assert (shape.vocabulary, shape.head_numel, shape.layers) == (0, 0, 2)
