"""Two ranks that train on a server: sharded adapters and weights reach it whole."""

import json

import pytest
import torch

from tests.launches import launch, run_module
from tests.rollout.servers.fake import FakeServer
from verl.models.load import load_causal_lm, load_tokenizer, resolve_path


def toy():
    model = load_causal_lm("toy", dtype=torch.float32)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("weights", ["adapter", "merged"])
def test_two_ranks_train_lora_on_a_server(tmp_path, weights):
    server = FakeServer(toy, name=str(resolve_path("toy")))
    server.tokenizer = load_tokenizer("toy")
    server.takes_adapters = True
    server.max_model_len = 512
    command = [
        "data.dataset_name=toy",
        "data.train_batch_size=4",
        "data.max_response_length=6",
        "actor_rollout_ref.model.path=toy",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.server_urls=[{server.url}]",
        f"actor_rollout_ref.rollout.lora_weights={weights}",
        "actor_rollout_ref.rollout.fingerprint_interval=1",
        "actor_rollout_ref.rollout.n=2",
        f"trainer.default_local_dir={tmp_path}",
        "trainer.logger=[file]",
        "trainer.max_steps=3",
    ]
    done = launch(2, run_module, "verl.trainer.main_ppo", command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(server.adapters) == (weights == "adapter")
    server.end()

    steps = []
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        if "training/rollout_kl" in metrics:
            steps.append(metrics)
    assert len(steps) == 3
    assert max(abs(step["training/rollout_kl"]) for step in steps) < 1e-5
