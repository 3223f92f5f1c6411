"""Offload on one CUDA device: offloaded tensors use no device memory, and no number changes."""

import pytest
import torch

from tests.engine.batches import COLUMNS, flat_gradient, make_batch, moments_of, smooth_loss
from tests.tiny_models import tiny_model
from verl.config import FSDPConfig, OptimConfig
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.packed import PackedCausalLM
from verl.utils.peaks import phase_peaks

pytestmark = pytest.mark.gpu
SHAPES = [(9, 12), (4, 30), (25, 7), (40, 41), (3, 5), (17, 22)]
BUDGET = TokenBudget(max_tokens=100)


def make_engine(layers: int = 4, **settings) -> TrainEngine:
    fsdp = {name: settings.pop(name) for name in list(settings) if name in FSDPConfig.__slots__}
    model = tiny_model(
        "qwen2", head_dim=16, hidden_size=256, intermediate_size=1024, num_hidden_layers=layers
    )

    return TrainEngine(
        PackedCausalLM(model),
        EngineOptions(
            device=torch.device("cuda"),
            optim=OptimConfig(lr=settings.pop("lr", 1e-3)),
            fsdp_config=FSDPConfig(**fsdp),
            grad_clip=1.0,
            **settings,
        ),
        total_steps=10,
    )


def steps(engine: TrainEngine, count: int = 3) -> list[float]:
    norms = []
    for seed in range(count):
        engine.forward_backward(make_batch(SHAPES, seed=seed), BUDGET, smooth_loss, COLUMNS)
        norms.append(engine.step().grad_norm)
    return norms


def local_bytes(tensors) -> int:
    return sum(
        tensor.to_local().untyped_storage().nbytes()
        for tensor in tensors
        if hasattr(tensor, "to_local")
    )


def test_parameters_and_moments_leave_the_device_between_phases():
    plain = make_engine()
    expected = steps(plain)
    size = local_bytes([*plain.module.parameters(), *moments_of(plain)])
    weights = {name: tensor.clone() for name, tensor in plain.parameters_for_rollout()}
    engine = make_engine(param_offload=True, optimizer_offload=True)
    assert steps(engine) == expected
    torch.cuda.synchronize()
    away = torch.cuda.memory_allocated()
    assert local_bytes([*engine.module.parameters(), *moments_of(engine)]) == 0
    with engine.on_device(optimizer=True):
        assert torch.cuda.memory_allocated() - away >= 0.99 * size
    assert torch.cuda.memory_allocated() == away
    handed_over = dict(engine.parameters_for_rollout())
    assert all(torch.equal(handed_over[name], tensor) for name, tensor in weights.items())


def test_offload_policy_steps_on_the_host():
    # In fp32: at the next bf16 number, a weight that moved by a rounding error moves by 0.4 %.
    exact = {"lr": 1e-4, "compute_dtype": "float32"}
    plain = make_engine(**exact)
    engine = make_engine(**exact, offload_policy=True)
    start = {name: tensor.clone() for name, tensor in plain.parameters_for_rollout()}
    assert steps(engine) == pytest.approx(steps(plain), rel=1e-2)
    handed_over = dict(engine.parameters_for_rollout())
    for name, tensor in plain.parameters_for_rollout():
        # AdamW on the host and on the device round differently, and may see different signs of a
        # gradient near 0.
        moved = (tensor - start[name]).norm()
        assert (handed_over[name].to(tensor.device) - tensor).norm() < 0.1 * moved, name
    assert {parameter.device.type for parameter in engine.module.parameters()} == {"cpu"}


def test_activations_on_the_host_change_no_gradient_and_free_memory():
    """Use long rows, so that activations dominate the memory of a pass; copies race with the
    computation."""
    shapes = [(2000, 2000)] * 3
    peaks = []
    gradients = []

    for offload in (False, True):
        # Prompt sharing, the other way to save memory, has no effect here: all prompts differ.
        engine = make_engine(
            layers=16, enable_gradient_checkpointing=True, enable_activation_offload=offload
        )
        batch = make_batch(shapes)
        for _ in range(2):
            engine.forward_backward(batch, TokenBudget(max_tokens=12_000), smooth_loss, COLUMNS)
        torch.cuda.synchronize()
        phase_peaks.take(engine.device)
        before = torch.cuda.memory_allocated()
        engine.forward_backward(batch, TokenBudget(max_tokens=12_000), smooth_loss, COLUMNS)
        peaks.append(phase_peaks.take(engine.device)[0] - before)
        gradients.append(flat_gradient(engine))
        del engine

    # the backward pass of varlen is not exact
    assert ((gradients[1] - gradients[0]).norm() / gradients[0].norm()).item() < 1e-3
    kept = 16 * 12_000 * 256 * 2  # bytes of the inputs of 16 layers
    assert peaks[1] < peaks[0] - 0.35 * kept  # a few layers are being copied
