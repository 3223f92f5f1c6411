"""Offloaded tensors leave the device between phases and passes, and are restored unchanged."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.distributed import jobs
from tests.distributed.jobs import WHOLE, Setup
from tests.engine.batches import COLUMNS, flat_gradient, make_batch, moments_of, smooth_loss
from verl.distributed import offload
from verl.distributed.mesh import close_process_group
from verl.distributed.offload import Offload
from verl.engine.base import TrainEngine
from verl.utils.errors import ConfigError

CPU = torch.device("cpu")
SHAPES = [(5, 9), (2, 3), (12, 10), (7, 1)]
OFFLOADED = Setup(shard=True, param_offload=True)


@pytest.fixture(autouse=True)
def process_group():
    yield
    close_process_group()


@pytest.mark.parametrize("chunk", [2**28, 1024])
def test_tensors_are_restored_unchanged(monkeypatch, chunk):
    # the small one splits tensors
    monkeypatch.setattr(offload, "CHUNK_BYTES", chunk)
    tied = torch.randn(40, 7)
    tensors = [
        tied,
        tied.t(),
        torch.arange(999),
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.randn(5).bfloat16(),
    ]

    expected = [tensor.clone() for tensor in tensors]
    kept = Offload(lambda: tensors, CPU)
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0, 0, 4, 0, 0]

    for _ in range(2):
        with kept.on_device():
            with kept.on_device():
                pass
            assert all(torch.equal(one, other) for one, other in zip(tensors, expected))
            tensors[2] += 1
            expected[2] += 1
        assert tied.untyped_storage().nbytes() == 0


def local_bytes(tensors) -> int:
    return sum(
        tensor.to_local().untyped_storage().nbytes()
        for tensor in tensors
        if hasattr(tensor, "to_local")
    )


def step(engine: TrainEngine, seed: int) -> float:
    engine.forward_backward(make_batch(SHAPES, seed=seed), WHOLE, smooth_loss, COLUMNS)
    return engine.step().grad_norm


def test_engine_is_on_the_host_between_phases(tmp_path: Path):
    engine = jobs.new_engine(OFFLOADED)
    plain = jobs.new_engine(Setup(shard=True))
    assert local_bytes(engine.module.parameters()) == 0
    assert [step(engine, 0), step(engine, 1)] == [step(plain, 0), step(plain, 1)]
    assert local_bytes([*engine.module.parameters(), *moments_of(engine)]) == 0

    with engine.on_device():
        assert local_bytes(engine.module.parameters()) > 0
        assert local_bytes(moments_of(engine)) == 0
        inferred = engine.infer(make_batch(SHAPES), WHOLE)["log_probs"]
        assert local_bytes(engine.module.parameters()) > 0, (
            "only the outermost context moves weights"
        )

    assert torch.equal(inferred, plain.infer(make_batch(SHAPES), WHOLE)["log_probs"])
    engine.save(tmp_path)
    handed_over = dict(engine.parameters_for_rollout())  # read after the iterator has ended
    assert all(
        torch.equal(value, handed_over[name]) for name, value in plain.parameters_for_rollout()
    )
    other = jobs.new_engine(OFFLOADED)
    other.load(tmp_path)

    assert local_bytes([*other.module.parameters(), *moments_of(other)]) == 0
    assert step(other, 2) == step(plain, 2)


def test_failed_pass_leaves_nothing_on_the_device():
    engine = jobs.new_engine(OFFLOADED)

    def fails(*_):
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        engine.forward_backward(make_batch(SHAPES), WHOLE, fails, COLUMNS)
    assert local_bytes(engine.module.parameters()) == 0


def test_activations_of_checkpointed_layers_are_on_the_host(monkeypatch):
    packed = []
    pack = offload._ActivationHooks.pack

    def counted(hooks, tensor):
        if tensor.numel():  # torch 2.11 has an empty tensor for each layer
            packed.append(tuple(tensor.shape))
        return pack(hooks, tensor)

    monkeypatch.setattr(offload._ActivationHooks, "pack", counted)
    plain = jobs.new_engine(Setup(checkpointing=True))
    kept = jobs.new_engine(Setup(checkpointing=True, activation_offload=True))
    gradients = []
    for engine in (plain, kept):
        engine.forward_backward(make_batch(SHAPES), WHOLE, smooth_loss, COLUMNS)
        gradients.append(flat_gradient(engine))
    tokens = sum(prompt + response for prompt, response in SHAPES)

    assert packed == [(1, tokens, 32)] * 2, "only the input of each of two layers"
    assert torch.equal(*gradients)


def test_activations_without_checkpointing_are_refused():
    with pytest.raises(ConfigError, match="enable_gradient_checkpointing=True"):
        jobs.new_engine(Setup(activation_offload=True))


def test_unsharded_module_on_the_cpu_is_not_moved():
    """Keep the weights in place: rollout engines alias them, and they are on the host already."""
    engine = jobs.new_engine(Setup(param_offload=True))
    addresses = [parameter.data_ptr() for parameter in engine.module.parameters()]
    step(engine, 0)
    assert [parameter.data_ptr() for parameter in engine.module.parameters()] == addresses
    assert all(
        isinstance(parameter, nn.Parameter) and parameter.abs().sum() > 0
        for parameter in engine.module.parameters()
    )
