"""Fakes of servers, and a run on them."""

import pytest

from tests.rollout.servers.fake import FakeServer
from tests.tiny_models import save_tiny, tiny_model
from tests.workers.batches import config


def untied_copy():
    """Make the model of a server: with a head of its own, as vLLM has one on a CPU."""
    tied = tiny_model("qwen2", tie_word_embeddings=True)
    model = tiny_model("qwen2", tie_word_embeddings=False)
    weights = tied.state_dict()
    model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    return model


@pytest.fixture
def start():
    servers = []

    def start(*arguments, **keywords):
        servers.append(FakeServer(untied_copy, *arguments, **keywords))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny", tie_word_embeddings=True)


@pytest.fixture
def settings(folder):
    settings = config(folder)
    rollout = settings.actor_rollout_ref.rollout
    rollout.server_timeout_s = 3.0
    rollout.fingerprint_interval = 1
    return settings
