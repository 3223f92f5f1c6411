"""Replays of the copies of vLLM's own `load_weights`, for its models as they are on a GPU.

On a CPU its engine packs layers, so the models are made here without an engine. Runs by the
interpreter of an environment that has vLLM as well as this package; `make test-vllm` does so.
"""

import importlib
import socket

import pytest
import torch

from tests.tiny_models import save_tiny
from verl.models.load import load_causal_lm
from verl.rollout.servers.weights import with_head
from verl.weight_sync.recorded_copies import RecordedLoad

pytest.importorskip("vllm", reason="this environment has no vLLM")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def ranks():
    """Make vLLM's groups of one rank."""
    config = importlib.import_module("vllm.config")
    state = importlib.import_module("vllm.distributed.parallel_state")
    with socket.socket() as free, config.set_current_vllm_config(config.VllmConfig()):
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        free.close()
        state.init_distributed_environment(1, 0, address, 0, backend="gloo")
        state.initialize_model_parallel(1, 1)
    yield
    state.destroy_model_parallel()
    state.destroy_distributed_environment()


def make(folder):
    """Make vLLM's own model of a folder, with weights that are not loaded."""
    arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    config = importlib.import_module("vllm.config")
    loading = importlib.import_module("vllm.model_executor.model_loader.utils")
    dtypes = importlib.import_module("vllm.utils.torch_utils")
    settings = arguments(model=str(folder), dtype="float32", enforce_eager=True)
    engine = settings.create_engine_config()
    with config.set_current_vllm_config(engine), dtypes.set_default_torch_dtype(torch.float32):
        return loading.initialize_model(vllm_config=engine)


@pytest.mark.parametrize(("family", "is_tied"), [("llama", True), ("qwen2", False)])
def test_replays_are_what_load_weights_does(tmp_path, ranks, family, is_tied):
    folder = save_tiny(tmp_path / family, family, tie_word_embeddings=is_tied, head_dim=32)
    trained = load_causal_lm(folder, dtype=torch.float32)
    model = make(folder)
    reference = make(folder)
    loads = RecordedLoad(model)
    calls = []
    own = model.load_weights
    model.load_weights = lambda weights: calls.append(1) or own(weights)

    for push in range(4):
        tensors = [(name, each.detach() + push) for name, each in trained.named_parameters()]
        handed = [(name, each.clone()) for name, each in with_head(tensors, trained)]
        reference.load_weights(handed)
        if push > 1:
            for parameter in model.parameters():
                parameter.data.fill_(float("nan"))
        loads.load([handed[:5], handed[5:]])
        assert loads.is_recorded
        for (name, one), other in zip(model.named_parameters(), reference.parameters()):
            assert torch.equal(one, other), name
    assert len(calls) == 4, "the first hand-over, and the proof of the first replay"
