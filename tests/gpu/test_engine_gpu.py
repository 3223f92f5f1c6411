"""The engine on one CUDA device (FSDP2 over a mesh of one, bf16 compute) against fp32 on the
CPU."""

import warnings
from pathlib import Path

import pytest
import torch

from tests.engine.batches import COLUMNS, flat_gradient, make_batch, moments_of, smooth_loss
from tests.tiny_models import tiny_model
from verl.config import FSDPConfig, OptimConfig
from verl.engine.base import TrainEngine
from verl.engine.flops import FlopsModel, model_flops_utilization
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.packed import PackedCausalLM

pytestmark = pytest.mark.gpu
SHAPES = [(9, 12), (4, 30), (25, 7), (40, 41), (3, 5), (17, 22)]
BUDGET = TokenBudget(max_tokens=100)


def make_engine(device: str, **settings) -> TrainEngine:
    model = tiny_model("qwen2", head_dim=16, hidden_size=64, intermediate_size=96)
    with torch.no_grad():
        # Large weights make bf16 rounding as large as the signal; halved, the model is still far
        # from flat.
        for parameter in model.parameters():
            parameter.mul_(0.5)

    return TrainEngine(
        PackedCausalLM(model),
        EngineOptions(
            device=torch.device(device), optim=OptimConfig(lr=1e-3), grad_clip=1.0, **settings
        ),
        total_steps=10,
    )


def gradient(engine: TrainEngine, budget: TokenBudget = BUDGET) -> torch.Tensor:
    engine.forward_backward(make_batch(SHAPES), budget, smooth_loss, COLUMNS)
    return flat_gradient(engine)


def relative_l2(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


def test_fp32_on_cuda_equals_fp32_on_cpu():
    """Expect close agreement without rounding to bf16: sharding, packing and kernels change
    nothing."""
    cpu = make_engine("cpu")
    cuda = make_engine("cuda", fsdp_config=FSDPConfig(compute_dtype="float32"))
    assert relative_l2(gradient(cuda), gradient(cpu)) < 1e-4
    one, other = (engine.infer(make_batch(SHAPES), BUDGET)["log_probs"] for engine in (cuda, cpu))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_bf16_step_is_near_the_fp32_step(checkpointing):
    cpu = make_engine("cpu")
    cuda = make_engine("cuda", enable_gradient_checkpointing=checkpointing)
    one, other = (engine.infer(make_batch(SHAPES), BUDGET)["log_probs"] for engine in (cuda, cpu))
    assert 1e-5 < (one - other).abs().mean().item() < 0.03
    assert relative_l2(gradient(cuda), gradient(cpu)) < 0.05
    results = [engine.step() for engine in (cuda, cpu)]
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=0.03)
    after = dict(cpu.parameters_for_rollout())

    for name, tensor in cuda.parameters_for_rollout():
        assert tensor.dtype == torch.float32
        # The first step of Adam moves every weight by at most lr; if the gradient is noise, the
        # sign of the step may differ.
        assert (tensor.cpu() - after[name]).abs().max().item() <= 2.2e-3

    assert {value.dtype for value in moments_of(cuda)} == {torch.float32}
    one, other = (engine.infer(make_batch(SHAPES), BUDGET)["log_probs"] for engine in (cuda, cpu))
    assert (one - other).abs().mean().item() < 0.05


def test_micro_batches_change_a_bf16_gradient_by_rounding_alone():
    engine = make_engine("cuda")
    whole = gradient(engine, TokenBudget(max_tokens=10_000))
    assert relative_l2(gradient(engine, TokenBudget(rows=1)), whole) < 0.02


def test_the_host_waits_once_per_mini_batch():
    engine = make_engine("cuda")
    waits = []
    for budget in (TokenBudget(rows=3), TokenBudget(rows=1)):
        gradient(engine, budget)  # allocations and first launches may wait
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                engine.forward_backward(make_batch(SHAPES), budget, smooth_loss, COLUMNS)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(
            [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
        )

    assert len(waits[0]) == len(waits[1]) == 1, waits


def test_the_guard_and_the_checkpoint_on_cuda(tmp_path: Path):
    engine = make_engine("cuda")
    gradient(engine)
    engine.step()
    before = {name: tensor.clone() for name, tensor in engine.parameters_for_rollout()}
    spoilt = make_batch(SHAPES)
    spoilt.batch["advantages"][3, 1] = float("nan")
    engine.forward_backward(spoilt, BUDGET, smooth_loss, COLUMNS)
    result = engine.step()

    assert (result.skipped, result.offenders) == (True, ["row 3 (uid prompt-1)"])
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in engine.parameters_for_rollout()
    )
    engine.save(tmp_path)

    for other in (make_engine("cuda"), make_engine("cpu")):
        other.load(tmp_path)
        loaded = dict(other.parameters_for_rollout())
        assert all(torch.equal(loaded[name].cpu(), tensor.cpu()) for name, tensor in before.items())
        assert not gradient(other).isnan().any()
        assert not other.step().skipped


def test_utilization_of_this_device_is_known():
    flops = FlopsModel.from_model(make_engine("cuda").hf_model)
    utilization = model_flops_utilization(flops.train([1024] * 8), 1.0, torch.device("cuda"))
    assert utilization is None or 0 < utilization < 1
