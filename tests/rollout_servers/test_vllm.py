"""Training, generation and failures on a real vLLM server."""

import os
import signal
import subprocess
import threading
import time

import pytest
import torch

from tests.rollout_servers import toy
from tests.rollout_servers.toy import check_ends, check_learning
from tests.tiny_models import tiny_tokenizer
from tests.workers.batches import CPU, actor_of, config, prompts
from verl.jobs.main_generation import main as main_generation
from verl.rollout.servers import weights
from verl.rollout.servers.vllm import VLLMServer
from verl.rollout.types import SamplingParams
from verl.utils.errors import RolloutError
from verl.workers import RolloutWorker

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture
def tied(tied_folder, servers):
    """Return an actor, and its rollout on the server of the tied model."""
    settings = config(tied_folder)
    rollout = settings.actor_rollout_ref.rollout
    rollout.name = "vllm"
    rollout.server_urls = list(servers["tied"].urls)
    rollout.fingerprint_interval = 1
    actor = actor_of(settings)
    worker = RolloutWorker(actor.config, device=CPU, tokenizer=tiny_tokenizer(), actor=actor)
    return actor, worker


def move(actor):
    with torch.no_grad():
        for parameter in actor.engine.module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def train(servers, folder, **keys):
    urls = list(servers["toy"].urls)
    return toy.train(folder, **{"actor_rollout_ref.rollout.server_urls": urls, **keys})


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_toy_learns_and_every_update_arrives(servers, tmp_path, mode):
    steps = train(servers, tmp_path, **{"actor_rollout_ref.rollout.mode": mode})
    check_learning(steps)


def test_the_toy_learns_by_adapters_on_a_server_that_keeps_its_weights(lora_server, tmp_path):
    keys = {
        "actor_rollout_ref.model.lora_rank": 8,
        "actor_rollout_ref.actor.optim.lr": 1e-2,
        "actor_rollout_ref.rollout.lora_weights": "adapter",
    }
    steps = train({"toy": lora_server}, tmp_path, **keys)
    check_learning(steps)

    [url] = lora_server.urls
    first, *adapters = VLLMServer(url)._adapters()
    assert first == VLLMServer(url).facts().model
    assert len(adapters) == 1, "only the newest adapter is kept"


@pytest.mark.parametrize("transport", ["disk", "host"])
def test_a_tied_head_arrives_with_every_push(tied, transport):
    actor, rollout = tied
    rollout.config.rollout.weight_transport = transport
    params = SamplingParams(max_new_tokens=10)
    for step in range(4):
        rollout.take_weights()
        batch = rollout.generate_sequences(prompts(4), n=2, params=params, seed=0, step=step)
        metrics = actor.compute_log_prob(batch).meta_info["metrics"]
        assert abs(metrics["training/rollout_kl"]) < 1e-6
        move(actor)


def test_the_proof_finds_the_stale_head_of_a_real_server(tied, monkeypatch):
    actor, rollout = tied
    rollout.take_weights()
    move(actor)
    with monkeypatch.context() as patched:
        patched.setattr(weights, "with_head", lambda tensors, model: tensors)
        with pytest.raises(RolloutError, match="other weights than the trainer's"):
            rollout.take_weights()
    rollout.take_weights()


def test_responses_end_as_those_of_the_embedded_engine(servers):
    check_ends(*toy.engines(server_urls=list(servers["toy"].urls)))


def test_a_server_that_is_killed_loses_no_sample(servers, tmp_path):
    """Kill the toy's server in the middle of training; the run waits for it to come back."""
    owned = servers["toy"]
    [url] = owned.urls
    keeper = owned._processes[url]
    metrics = tmp_path / "metrics.jsonl"

    def kill():
        while not metrics.exists() or "training/rollout_kl" not in metrics.read_text():
            time.sleep(0.05)
        [child] = subprocess.check_output(["pgrep", "-P", str(keeper.pid)], text=True).split()
        os.kill(int(child), signal.SIGKILL)
        keeper.wait()
        owned.restart(url)

    thread = threading.Thread(target=kill)
    thread.start()
    transport = {"actor_rollout_ref.rollout.weight_transport": "host"}
    steps = train(servers, tmp_path, **transport)
    thread.join()
    assert len(steps) == 10
    assert max(abs(step["training/rollout_kl"]) for step in steps) < 1e-6


def test_main_generation_draws_on_a_server(servers, tmp_path):
    output = tmp_path / "out.parquet"
    main_generation(
        [
            "data.path=toy",
            f"data.output_path={output}",
            "data.n_samples=2",
            "model.path=toy",
            "rollout.name=vllm",
            f"rollout.server_urls=[{servers['toy'].urls[0]}]",
            "rollout.prompt_length=32",
            "rollout.response_length=16",
        ]
    )
    assert output.exists()
