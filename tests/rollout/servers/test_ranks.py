"""Two ranks that train on a server, or on an engine of each: sharded adapters and weights reach
them whole."""

import json

import pytest

from tests.launches import launch, run_module
from tests.rollout.servers.fake import FakeServer, toy_model
from verl.models.load import load_tokenizer, resolve_path


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["adapter", "merged"])
def test_two_ranks_train_lora_on_a_server(tmp_path, weights):
    server = FakeServer(toy_model, name=str(resolve_path("toy")))
    server.tokenizer = load_tokenizer("toy")
    server.takes_adapters = True
    server.max_model_len = 512
    train(
        tmp_path,
        "actor_rollout_ref.model.lora_rank=4",
        f"actor_rollout_ref.rollout.server_urls=[{server.url}]",
        f"actor_rollout_ref.rollout.lora_weights={weights}",
    )
    assert len(server.adapters) == (weights == "adapter")
    server.end()


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_two_ranks_train_with_an_engine_of_each(tmp_path, lora_rank):
    train(
        tmp_path,
        f"actor_rollout_ref.model.lora_rank={lora_rank}",
        "actor_rollout_ref.model.external_lib=tests.rollout.servers.with_fake_vllm",
        "actor_rollout_ref.rollout.in_process=true",
    )


def train(folder, *keys):
    """Train the toy for three steps on two ranks. Tokens are drawn by the trainer's weights."""
    command = [
        "data.dataset_name=toy",
        "data.train_batch_size=4",
        "data.max_response_length=6",
        "actor_rollout_ref.model.path=toy",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.fingerprint_interval=1",
        "actor_rollout_ref.rollout.n=2",
        f"trainer.default_local_dir={folder}",
        "trainer.logger=[file]",
        "trainer.max_steps=3",
        *keys,
    ]
    done = launch(2, run_module, "verl.trainer.main_ppo", command)
    assert done.returncode == 0, done.stderr[-3000:]

    steps = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        if "training/rollout_kl" in metrics:
            steps.append(metrics)
    assert len(steps) == 3
    assert max(abs(step["training/rollout_kl"]) for step in steps) < 1e-5
