"""Pushes of weights to servers: log-probs after them, and faults that are caught."""

import pytest
import torch

from tests.cases import cases
from tests.rollout.servers.rollouts import FAULTS, draw, largest_kl, move, rollout_on
from tests.tiny_models import tiny_model
from tests.workers.batches import R, actor_of, prompts
from verl.rollout.types import SamplingParams
from verl.utils.errors import RolloutError


@pytest.mark.parametrize(
    ("dialect", "version", "temperature"),
    [
        pytest.param("vllm", "0.32.0", 1.0, marks=pytest.mark.slow),
        ("vllm", "0.32.0", 0.7),
        pytest.param("vllm", "0.24.0", 0.7, marks=pytest.mark.slow),
        ("sglang", "0.5.23", 0.7),
        pytest.param("sglang", "0.5.3", 0.7, marks=pytest.mark.slow),
    ],
)
def test_log_probs_are_the_trainers_after_every_push(
    settings, start, dialect, version, temperature
):
    server = start(dialect, version)
    actor = actor_of(settings)
    rollout = rollout_on(settings, server, actor=actor, temperature=temperature)
    params = SamplingParams(max_new_tokens=R, temperature=temperature)
    for step in range(2):
        rollout.take_weights()
        batch = rollout.generate_sequences(prompts(4), n=2, params=params, seed=0, step=step)
        again = rollout.generate_sequences(prompts(4), n=2, params=params, seed=0, step=step)
        assert torch.equal(batch.batch["responses"], again.batch["responses"])
        metrics = actor.compute_log_prob(batch).meta_info["metrics"]
        assert abs(metrics["training/rollout_kl"]) < 1e-5
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        move(actor)


def test_a_server_without_the_route_of_tokens_completes(settings, start):
    server = start()
    server.faults.add("no scale out")
    actor = actor_of(settings)
    rollout = rollout_on(settings, server, actor=actor, temperature=0.7)
    params = SamplingParams(max_new_tokens=R, temperature=0.7)
    rollout.take_weights()
    batch = rollout.generate_sequences(prompts(4), n=2, params=params, seed=0, step=0)
    assert largest_kl(actor, batch) < 1e-5


# In the quick suite, tests/rollout/servers/test_hand_over.py has all faults of a vLLM server.
@pytest.mark.parametrize(
    ("dialect", "fault"),
    cases(
        ["vllm", "sglang"],
        FAULTS,
        quick=lambda dialect, fault: dialect == "sglang" or fault == "dropped",
    ),
)
def test_a_push_that_did_not_arrive_whole_is_caught(settings, start, dialect, fault):
    server = start(dialect)
    actor = actor_of(settings)
    rollout = rollout_on(settings, server, actor=actor)
    rollout.take_weights()
    draw(rollout)
    move(actor)
    server.faults.add(fault)
    message = "did not drop its prefix cache" if fault == "flush refused" else "other weights than"
    with pytest.raises(RolloutError, match=message):
        rollout.take_weights()
    assert not server.is_paused, "others who use the server can go on"


class Full:
    """A source of weights whose memory is full."""

    is_adapter = False

    def fill(self, server, version):
        assert server.is_paused
        raise MemoryError


def test_a_server_goes_on_after_a_push_that_an_error_of_the_trainer_ends(settings, start):
    server = start()
    fleet = rollout_on(settings, server).engine.fleet
    with pytest.raises(MemoryError):
        fleet.push(Full(), "v1")
    assert not server.is_paused


def test_a_push_to_another_model_is_caught(settings, start):
    server = start()
    actor = actor_of(settings)
    rollout = rollout_on(settings, server, actor=actor)
    other = tiny_model("qwen2", tie_word_embeddings=True, num_hidden_layers=1)
    server.make_model = lambda: other
    with pytest.raises(RolloutError, match="other weights than the trainer's.*--dtype float32"):
        rollout.take_weights()


@pytest.mark.parametrize("dialect", cases(["vllm", "sglang"], quick=lambda name: name == "vllm"))
def test_weights_can_come_through_memory(settings, start, dialect):
    server = start(dialect)
    actor = actor_of(settings)
    rollout = rollout_on(settings, server, actor=actor, weight_transport="host")
    for _ in range(2):
        rollout.take_weights()
        assert largest_kl(actor, draw(rollout)) < 1e-5
        move(actor)

    rollout.take_weights()
    expected = draw(rollout).batch["responses"]
    server.end()
    server.start()
    assert torch.equal(draw(rollout).batch["responses"], expected), (
        "the tensors are asked for again"
    )
    server.faults.add("half")
    move(actor)
    with pytest.raises(RolloutError, match="other weights than"):
        rollout.take_weights()


def test_a_server_that_does_not_know_the_extension_ends_the_wait(settings, start):
    server = start()
    rollout = rollout_on(settings, server, weight_transport="host")
    server._rpc = lambda body: (500, {"error": "no method verl_take_weights"})
    with pytest.raises(RolloutError, match="500 to /collective_rpc: .*no method"):
        rollout.take_weights()


def test_a_server_that_cannot_connect_to_the_trainer_ends_the_wait(settings, start, monkeypatch):
    server = start("sglang")
    rollout = rollout_on(settings, server, weight_transport="host")

    def refuse(*args, **kwargs):
        raise FileNotFoundError("no such socket")

    monkeypatch.setattr("verl.weight_sync.ipc.Client", refuse)
    with pytest.raises(RolloutError, match="Run it on the trainer's machine"):
        rollout.take_weights()
