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


@pytest.fixture(scope="session")
def servers(tied_folder):
    """Start a server of the packaged toy model and one of the tied model, at the same time."""

    def start(model):
        config = RolloutConfig(
            name="vllm",
            server_python=os.environ["VLLM_PYTHON"],
            prompt_length=120,
            response_length=120,
            enforce_eager=True,
        )
        return OwnedServers(VLLMServer, config, model, torch.float32)

    folders = [resolve_path("toy"), tied_folder]
    models = [load_causal_lm(folder, dtype=torch.float32) for folder in folders]
    with ThreadPoolExecutor() as pool:
        toy, tied = pool.map(start, models)
    yield {"toy": toy, "tied": tied}
    toy.close()
    tied.close()
