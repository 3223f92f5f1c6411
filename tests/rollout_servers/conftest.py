"""Real vLLM servers on the CPU. `make test-vllm` makes their environment and runs these tests."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.tiny_models import save_tiny
from verl.config.rollout import RolloutConfig
from verl.models.load import load_causal_lm, resolve_path
from verl.rollout.servers.owned import OwnedServers
from verl.rollout.servers.vllm import VLLMServer


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory):
    """Save a model whose head is its embedding: the case that goes stale in vLLM on a CPU."""
    folder = tmp_path_factory.mktemp("models") / "tied"
    return save_tiny(folder, "llama", tie_word_embeddings=True, head_dim=32)


def start(model, lora_rank=0):
    """Start a server of `model` that takes adapters of a rank, or whole weights."""
    config = RolloutConfig(
        name="vllm",
        server_python=os.environ["VLLM_PYTHON"],
        prompt_length=120,
        response_length=120,
        enforce_eager=True,
    )
    return OwnedServers(VLLMServer, config, model, torch.float32, lora_rank=lora_rank)


@pytest.fixture(scope="session")
def servers(tied_folder):
    """Start a server of the packaged toy model and one of the tied model, at the same time."""
    folders = [resolve_path("toy"), tied_folder]
    models = [load_causal_lm(folder, dtype=torch.float32) for folder in folders]
    with ThreadPoolExecutor() as pool:
        toy, tied = pool.map(start, models)
    yield {"toy": toy, "tied": tied}
    toy.close()
    tied.close()


@pytest.fixture
def lora_server():
    """Start a server of the toy model that takes adapters, and has its first weights."""
    model = load_causal_lm(resolve_path("toy"), dtype=torch.float32)
    server = start(model, lora_rank=8)
    yield server
    server.close()
