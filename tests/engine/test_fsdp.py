"""FSDP2 over a mesh of one CPU process matches the plain module."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.engine.batches import (
    COLUMNS,
    flat_gradient,
    gradients_of,
    make_batch,
    moments_of,
    smooth_loss,
)
from tests.tiny_models import tiny_model
from verl.config import FSDPConfig, OptimConfig
from verl.distributed.fsdp import OneRankReduction, decoder_layers, recover
from verl.distributed.mesh import close_process_group
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.packed import PackedCausalLM

SHAPES = [(5, 9), (2, 3), (12, 10), (7, 1), (3, 6)]
BUDGET = TokenBudget(rows=2)


@pytest.fixture(autouse=True)
def process_group():
    yield
    close_process_group()


def make_engine(
    *, shard: bool, family: str = "qwen2", tied: bool = False, **settings
) -> TrainEngine:
    return TrainEngine(
        PackedCausalLM(tiny_model(family, tie_word_embeddings=tied)),
        EngineOptions(
            device=torch.device("cpu"),
            optim=OptimConfig(lr=1e-2),
            grad_clip=0.5,
            shard=shard,
            **settings,
        ),
        total_steps=5,
    )


BF16 = FSDPConfig(compute_dtype="bfloat16")
GATHERED = FSDPConfig(reshard_after_forward=False)


def train(engine: TrainEngine, steps: int) -> list[dict[str, float]]:
    log = []
    for seed in range(steps):
        batch = make_batch(SHAPES, seed=seed)
        # An evaluation between steps detects gathered weights of an older step.
        before = engine.infer(batch, BUDGET)["log_probs"].double().sum().item()
        metrics = engine.forward_backward(batch, BUDGET, smooth_loss, COLUMNS)
        log.append({**metrics, "grad_norm": engine.step().grad_norm, "before": before})
        engine.step_schedule()
    return log


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tied": True},
        {"enable_gradient_checkpointing": True},
        {"fsdp_config": GATHERED},
        {"fsdp_config": GATHERED, "enable_gradient_checkpointing": True, "tied": True},
    ],
    ids=["plain", "tied", "checkpointing", "gathered", "gathered, checkpointing, tied"],
)
def test_mesh_of_one_trains_like_no_mesh(settings):
    plain = make_engine(shard=False, **settings)
    sharded = make_engine(shard=True, **settings)
    assert train(sharded, 3) == [
        pytest.approx(line, rel=1e-5, abs=1e-6) for line in train(plain, 3)
    ]
    expected = dict(plain.parameters_for_rollout())
    named = dict(sharded.parameters_for_rollout())
    assert list(named) == list(expected)
    for name, tensor in named.items():
        assert not isinstance(tensor, DTensor)
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


def count_gathers(group, gathered: list[bool]) -> None:
    unshard = group.unshard

    def counted(*args):
        gathered.append(group.is_sharded)
        return unshard(*args)

    group.unshard = counted


def test_weights_stay_gathered_for_one_mini_batch():
    """Include a mini-batch that fails and one that is skipped."""
    once, always = (
        make_engine(shard=True, fsdp_config=replace(BF16, reshard_after_forward=reshards))
        for reshards in (False, None)
    )
    gathered: list[bool] = []
    for layer in once.hf_model.model.layers:
        count_gathers(layer._get_fsdp_state()._fsdp_param_group, gathered)

    def broken(outputs, columns, sequence):
        if len(calls) == 2:
            raise RuntimeError("broken off")
        calls.append(None)
        return smooth_loss(outputs, columns, sequence)

    calls: list[None] = []
    batch = make_batch(SHAPES)
    with pytest.raises(RuntimeError, match="broken off"):
        once.forward_backward(batch, TokenBudget(rows=1), broken, COLUMNS)

    recover(once.module)
    gathered.clear()
    for engine in (once, always):
        engine.forward_backward(batch, TokenBudget(rows=1), smooth_loss, COLUMNS)
    assert sum(gathered) == len(once.hf_model.model.layers)
    assert torch.equal(flat_gradient(once), flat_gradient(always))

    nan = make_batch(SHAPES)
    nan.batch["advantages"][1] = float("nan")
    once.step(), always.step()
    for engine in (once, always):
        engine.forward_backward(nan, TokenBudget(rows=1), smooth_loss, COLUMNS)
        assert engine.step().skipped
    assert train(once, 2) == train(always, 2)


def test_every_layer_is_a_unit_and_parameters_stay_fp32():
    engine = make_engine(shard=True, fsdp_config=BF16)
    units = [module for module in engine.module.modules() if isinstance(module, FSDPModule)]
    assert units == [engine.module, *engine.hf_model.model.layers]
    train(engine, 1)
    batch = make_batch(SHAPES)
    engine.forward_backward(batch, BUDGET, smooth_loss, COLUMNS)
    for parameter in engine.module.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.dtype == torch.float32
    assert all(gradient.dtype == torch.float32 for gradient in gradients_of(engine).values())
    assert all(value.dtype == torch.float32 for value in moments_of(engine))


def test_bf16_compute_is_near_fp32():
    exact = make_engine(shard=False)
    rounded = make_engine(shard=True, fsdp_config=BF16)
    batch = make_batch(SHAPES)
    difference = exact.infer(batch, BUDGET)["log_probs"] - rounded.infer(batch, BUDGET)["log_probs"]
    # A difference proves that bf16 was used; logits of this model deviate by 3 and more.
    assert 1e-4 < difference.abs().mean() < 0.2


def test_accumulated_gradients_keep_small_micro_batches():
    """Add gradients in fp32: bf16 sums would lose small micro-batches next to a large one."""
    engine = make_engine(shard=True, fsdp_config=BF16)
    batch = make_batch(SHAPES)
    batch.batch["weights"][0] *= 4096
    collected = []
    for order in (BUDGET, TokenBudget(rows=1)):
        engine.forward_backward(batch, order, smooth_loss, COLUMNS)
        collected.append(flat_gradient(engine))
    single = torch.zeros_like(collected[0])
    for row in range(len(SHAPES)):
        engine.forward_backward(batch[[row]], TokenBudget(rows=1), smooth_loss, COLUMNS)
        single += flat_gradient(engine)
    # bf16 addition would be off by about 2e-3.
    assert ((collected[1] - single).norm() / single.norm()).item() < 1e-6
    assert ((collected[0] - single).norm() / single.norm()).item() < 1e-2


@pytest.mark.parametrize("config", [FSDPConfig(), GATHERED, BF16], ids=["plain", "kept", "bf16"])
def test_one_rank_reduces_gradients_in_place(config: FSDPConfig, monkeypatch):
    """Each unit has one buffer, in which the gradients of its parameters lie."""
    buffers = []
    allocate = OneRankReduction.allocate

    def recorded(self: OneRankReduction, *args, **settings) -> torch.Tensor:
        buffer = allocate(self, *args, **settings)
        buffers.append(buffer.untyped_storage().data_ptr())
        return buffer

    monkeypatch.setattr(OneRankReduction, "allocate", recorded)
    engine = make_engine(shard=True, fsdp_config=config)
    engine.forward_backward(make_batch(SHAPES), TokenBudget(rows=5), smooth_loss, COLUMNS)
    gradients = set()
    for parameter in engine.module.parameters():
        assert isinstance(parameter.grad, DTensor)
        gradients.add(parameter.grad.to_local().untyped_storage().data_ptr())

    units = sum(isinstance(module, FSDPModule) for module in engine.module.modules())
    assert buffers[::2] == buffers[1::2]
    assert set(buffers) == gradients
    assert len(gradients) == units


def test_reduction_after_a_failed_pass_takes_a_new_buffer():
    reduction = OneRankReduction()
    failed = reduction.allocate((3,), dtype=torch.float32, device=torch.device("cpu"))
    del failed
    first = reduction.allocate((3,), dtype=torch.float32, device=torch.device("cpu"))
    second = reduction.allocate((3,), dtype=torch.float32, device=torch.device("cpu"))
    third = reduction.allocate((3,), dtype=torch.float32, device=torch.device("cpu"))
    assert first is second
    assert third is not first


def test_guard_works_on_shards():
    engine = make_engine(shard=True)
    train(engine, 1)
    before = {name: tensor.clone() for name, tensor in engine.parameters_for_rollout()}
    batch = make_batch(SHAPES)
    batch.batch["advantages"][4, 0] = float("inf")
    engine.forward_backward(batch, BUDGET, smooth_loss, COLUMNS)
    result = engine.step()
    assert (result.skipped, result.offenders) == (True, ["row 4 (uid prompt-2)"])
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in engine.parameters_for_rollout()
    )


@pytest.mark.parametrize(("saver", "loader"), [(True, False), (False, True), (True, True)])
def test_checkpoint_is_independent_of_the_mesh(tmp_path: Path, saver: bool, loader: bool):
    first = make_engine(shard=saver)
    second = make_engine(shard=loader)
    train(first, 2)
    first.save(tmp_path)
    second.load(tmp_path)
    expected = dict(first.parameters_for_rollout())
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in second.parameters_for_rollout()
    )
    assert train(second, 2) == [pytest.approx(line, rel=1e-5, abs=1e-6) for line in train(first, 2)]


def test_evaluation_sees_new_weights_at_once(tmp_path: Path):
    """Gather weights again after a step or a load between two evaluations."""
    engine = make_engine(shard=True, fsdp_config=BF16)
    engine.save(tmp_path)
    batch = make_batch(SHAPES)
    old = engine.infer(batch, BUDGET)["log_probs"]
    engine.forward_backward(batch, BUDGET, smooth_loss, COLUMNS)
    assert torch.equal(engine.infer(batch, BUDGET)["log_probs"], old)
    engine.step()
    new = engine.infer(batch, BUDGET)["log_probs"]

    trained = make_engine(shard=True, fsdp_config=BF16)
    with torch.no_grad():
        for one, other in zip(trained.module.parameters(), engine.module.parameters()):
            one.copy_(other)

    assert torch.equal(trained.infer(batch, BUDGET)["log_probs"], new)
    assert not torch.equal(new, old)
    engine.load(tmp_path)
    assert torch.equal(engine.infer(batch, BUDGET)["log_probs"], old)


def test_layers_are_found_in_every_family():
    assert [len(decoder_layers(tiny_model(family))) for family in ("gpt2", "opt", "qwen3_moe")] == [
        2,
        2,
        2,
    ]
