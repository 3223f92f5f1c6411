"""Training, generation and failures on a real vLLM server."""

import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.tiny_models import tiny_tokenizer
from tests.workers.batches import CPU, actor_of, config, prompts
from verl.config import config_from_dict
from verl.jobs.main_generation import main as main_generation
from verl.models.load import load_tokenizer
from verl.rollout import create_rollout_engine, generate
from verl.rollout.servers import weights
from verl.rollout.servers.vllm import VLLMServer
from verl.rollout.types import Request, SamplingParams
from verl.trainer import RLTrainer
from verl.utils.errors import RolloutError
from verl.workers import ActorWorker, RolloutWorker

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
    trainer = RLTrainer(
        {
            "data.dataset_name": "toy",
            "data.train_batch_size": 4,
            "actor_rollout_ref.model.path": "toy",
            "actor_rollout_ref.rollout.name": "vllm",
            "actor_rollout_ref.rollout.server_urls": list(servers["toy"].urls),
            "actor_rollout_ref.rollout.fingerprint_interval": 1,
            "trainer.default_local_dir": str(folder),
            "trainer.logger": ["file"],
            "trainer.max_steps": 10,
            **keys,
        }
    )
    trainer.train()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    return [step for step in steps if "training/rollout_kl" in step]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_toy_learns_and_every_update_arrives(servers, tmp_path, mode):
    steps = train(servers, tmp_path, **{"actor_rollout_ref.rollout.mode": mode})
    assert len(steps) == 10
    assert max(abs(step["training/rollout_kl"]) for step in steps) < 1e-6
    rewards = [step["critic/rewards/mean"] for step in steps]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.5


def test_the_toy_learns_by_adapters_on_a_server_that_keeps_its_weights(lora_server, tmp_path):
    keys = {
        "actor_rollout_ref.model.lora_rank": 8,
        "actor_rollout_ref.actor.optim.lr": 1e-2,
        "actor_rollout_ref.rollout.lora_weights": "adapter",
    }
    steps = train({"toy": lora_server}, tmp_path, **keys)
    assert len(steps) == 10
    assert max(abs(step["training/rollout_kl"]) for step in steps) < 1e-6
    rewards = [step["critic/rewards/mean"] for step in steps]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.5

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
        patched.setattr(weights, "tied_names", lambda model: None)
        with pytest.raises(RolloutError, match="other weights than the trainer's"):
            rollout.take_weights()
    rollout.take_weights()


def test_responses_end_as_those_of_the_embedded_engine(servers):
    """Stop tokens and stop strings are kept, and limits count."""
    settings = config_from_dict(
        {
            "data": {"dataset_name": "toy", "train_batch_size": 4},
            "actor_rollout_ref": {"model": {"path": "toy"}},
        }
    )
    tokenizer = load_tokenizer("toy")
    actor = ActorWorker(settings.actor_rollout_ref, total_steps=1, device=CPU, tokenizer=tokenizer)
    rollout = settings.actor_rollout_ref.rollout
    parts = {"model": actor.engine.hf_model, "tokenizer": tokenizer, "device": CPU}
    embedded = create_rollout_engine(rollout, **parts)
    on_server = replace(rollout, name="vllm", server_urls=list(servers["toy"].urls))
    section = replace(settings.actor_rollout_ref, rollout=on_server)
    worker = RolloutWorker(section, device=CPU, tokenizer=tokenizer, actor=actor)
    worker.take_weights()

    prompt = tuple(tokenizer.encode("3 + 11 = ?"))
    request = Request(prompt_ids=prompt, sample_ids=(0,))

    def greedy(engine, **stops):
        params = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True, **stops)
        [completion] = generate(engine, [request], params, seed=0, step=0)
        return completion

    free = greedy(embedded)
    word = tokenizer.decode(free.token_ids[1:3])
    for stops in ({}, {"stop_token_ids": (free.token_ids[2],)}, {"stop": (word,)}):
        ours = greedy(embedded, **stops)
        theirs = greedy(worker.engine, **stops)
        assert theirs.token_ids == ours.token_ids, stops
        assert theirs.finish_reason == ours.finish_reason
        np.testing.assert_allclose(theirs.log_probs, ours.log_probs, atol=1e-4)


def test_a_server_that_is_killed_loses_no_sample(servers, tmp_path):
    """Kill the toy's server in the middle of a generation; the run waits for it to come back."""
    owned = servers["toy"]
    [url] = owned.urls
    keeper = owned._processes[url]

    def kill():
        time.sleep(2.0)
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
