"""LoRA adapters that servers draw by, against fakes that speak vLLM's documented exchanges."""

import pytest
import torch

from tests.cases import cases
from tests.rollout.servers.rollouts import draw, largest_kl, rollout_on, updated_rollout
from tests.tiny_models import tiny_tokenizer
from tests.tiny_vision_models import tiny_vision_model
from tests.workers.batches import CPU, actor_of, config
from verl.models.lora import adapted_layers, apply_lora
from verl.rollout import check_engine
from verl.rollout.servers.owned import OwnedServers
from verl.rollout.servers.sglang import SGLangServer
from verl.rollout.servers.sources import adapter_rank
from verl.rollout.servers.vllm import VLLMServer
from verl.utils.errors import ConfigError, RolloutError
from verl.workers import RolloutWorker

VERSIONS = ["0.32.0", "0.24.0"]


@pytest.fixture
def lora(settings):
    """Settings of a run that trains LoRA, on a server that is the user's."""
    settings.actor_rollout_ref.model.lora_rank = 4
    settings.actor_rollout_ref.rollout.lora_weights = "adapter"
    return settings


def move(actor):
    """Change every adapter, as an update does."""
    with torch.no_grad():
        for layer in adapted_layers(actor.engine.hf_model).values():
            factor = layer.lora_B["default"].weight
            factor.add_(torch.randn_like(factor) * 0.1)


def server_with_adapters(start, *arguments):
    server = start(*arguments)
    server.takes_adapters = True
    return server


@pytest.mark.parametrize(
    ("version", "fault"),
    cases(VERSIONS, [None, "no scale out"], quick=lambda version, _: version == VERSIONS[0]),
)
def test_only_the_adapter_travels_and_log_probs_are_the_trainers(lora, start, version, fault):
    server = server_with_adapters(start, "vllm", version)
    server.faults.add(fault)
    base = server.model
    actor = actor_of(lora)
    rollout = rollout_on(lora, server, actor=actor)
    for push in range(3):
        rollout.take_weights()
        assert largest_kl(actor, draw(rollout)) < 1e-5
        assert server.model is base
        names = list(server.adapters)
        assert len(names) == 1, "the one before is forgotten"
        assert names[0].endswith(f"-{push + 1}")
        move(actor)


@pytest.mark.parametrize("fault", ["dropped", "half"])
def test_an_adapter_that_did_not_arrive_whole_is_caught(lora, start, fault):
    server = server_with_adapters(start)
    actor = actor_of(lora)
    rollout = rollout_on(lora, server, actor=actor)
    rollout.take_weights()
    move(actor)
    server.faults.add(fault)
    with pytest.raises(RolloutError, match="other weights than the trainer's"):
        rollout.take_weights()
    assert not server.is_paused


def test_a_server_of_another_model_is_caught(lora, start):
    server = server_with_adapters(start)
    rollout = rollout_on(lora, server)
    with torch.no_grad():
        server.model.lm_head.weight.mul_(1.1)
    with pytest.raises(RolloutError, match="other weights than the trainer's"):
        rollout.take_weights()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_that_restarts_gets_the_adapter_before_it_draws(lora, start, version):
    server = server_with_adapters(start, "vllm", version)
    rollout = updated_rollout(lora, server, update=move)
    expected = draw(rollout).batch["responses"]
    server.end()
    server.start()
    assert torch.equal(draw(rollout).batch["responses"], expected)

    server.end()
    server.start()
    rollout.take_weights()  # which draws before the push
    assert torch.equal(draw(rollout).batch["responses"], expected)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_draw_on_a_server_that_lost_the_adapter_is_drawn_again(lora, start, version):
    server = server_with_adapters(start, "vllm", version)
    rollout = updated_rollout(lora, server, update=move)
    expected = draw(rollout).batch["responses"]
    check = rollout.engine.fleet.check_versions

    def lose():
        check()
        server.adapters.clear()

    rollout.engine.fleet.check_versions = lose
    batch = draw(rollout)
    assert torch.equal(batch.batch["responses"], expected)
    assert batch.meta_info["metrics"]["rollout/num_redrawn"] >= 1


def test_merged_weights_stay_possible(lora, start):
    server = server_with_adapters(start)
    actor = actor_of(lora)
    rollout = rollout_on(lora, server, actor=actor, lora_weights="merged")
    move(actor)
    rollout.take_weights()
    assert largest_kl(actor, draw(rollout)) < 1e-5
    assert not server.adapters


def test_a_server_of_the_user_gets_merged_weights_unless_asked(lora, start):
    server = start()
    actor = actor_of(lora)
    rollout = rollout_on(lora, server, actor=actor, lora_weights=None)
    assert not rollout.engine.takes_adapters
    move(actor)
    rollout.take_weights()
    assert largest_kl(actor, draw(rollout)) < 1e-5


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, True),
        ({"weight_transport": "disk"}, True),
        ({"weight_transport": "host"}, False),
        ({"lora_weights": "merged"}, False),
        ({"server_urls": ["http://h"]}, False),
        ({"name": "sglang"}, False),
    ],
)
def test_servers_that_the_run_starts_take_adapters_by_default(settings, keys, expected):
    settings.actor_rollout_ref.model.lora_rank = 4
    rollout = settings.actor_rollout_ref.rollout
    rollout.name = "vllm"
    for key, value in keys.items():
        setattr(rollout, key, value)
    server_class = {"vllm": VLLMServer, "sglang": SGLangServer}[rollout.name]
    model = actor_of(settings).engine.hf_model
    assert adapter_rank(rollout, server_class, model) == (4 if expected else 0)


def test_adapters_of_a_vision_tower_travel_merged(settings):
    rollout = settings.actor_rollout_ref.rollout
    rollout.name = "vllm"
    of_text = tiny_vision_model("internvl")
    apply_lora(of_text, rank=4, alpha=8)
    assert adapter_rank(rollout, VLLMServer, of_text) == 4

    of_both = tiny_vision_model("internvl")
    apply_lora(of_both, rank=4, alpha=8, target_modules=["q_proj"])
    assert adapter_rank(rollout, VLLMServer, of_both) == 0
    rollout.lora_weights = "adapter"
    with pytest.raises(ConfigError, match="ignores adapters of a vision tower.*all-linear"):
        adapter_rank(rollout, VLLMServer, of_both)


def test_a_started_server_has_room_for_the_rank():
    command = VLLMServer.command("python", "M", 8000, lora_rank=9)
    assert command[command.index("--enable-lora") :] == ["--enable-lora", "--max-lora-rank", "16"]
    assert VLLMServer.environment(9)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--enable-lora" not in VLLMServer.command("python", "M", 8000, lora_rank=0)


def test_a_server_without_the_route_for_adapters_is_one_error_at_start(lora, start):
    server = start()
    with pytest.raises(ConfigError, match="no route for adapters.*UPDATING=1.*rank 8.*=merged"):
        rollout_on(lora, server)


def test_a_rank_that_the_server_was_not_started_for_is_refused_by_name(lora, start):
    server = server_with_adapters(start)
    server.max_lora_rank = 2
    rollout = rollout_on(lora, server)
    with pytest.raises(RolloutError, match="rank 4 is greater.*--max-lora-rank RANK.*=merged"):
        rollout.take_weights()
    assert not server.is_paused


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "embedded"}, "draws by adapters, got .*name=embedded. Set name=vllm, or"),
        ({"name": "sglang"}, "draws by adapters, got .*name=sglang"),
        ({"name": "vllm", "weight_transport": "host"}, "sends adapters in a folder"),
    ],
)
def test_engines_without_adapters_refuse_the_key(tmp_path, keys, message):
    rollout = config(tmp_path / "m").actor_rollout_ref.rollout
    rollout.lora_weights = "adapter"
    for key, value in keys.items():
        setattr(rollout, key, value)
    with pytest.raises(ConfigError, match=message):
        check_engine(rollout)


def test_a_rank_beyond_all_servers_is_refused(lora, start):
    lora.actor_rollout_ref.model.lora_rank = 600
    with pytest.raises(ConfigError, match="ranks up to 512, got .*lora_rank=600"):
        rollout_on(lora, server_with_adapters(start))


def test_servers_are_started_with_the_rank_of_the_run(lora, monkeypatch):
    seen = {}

    def started(self, *arguments, lora_rank):
        seen["rank"] = lora_rank
        raise RolloutError("stop here")

    monkeypatch.setattr(OwnedServers, "__init__", started)
    rollout = lora.actor_rollout_ref.rollout
    rollout.lora_weights = None
    rollout.name = "vllm"
    with pytest.raises(RolloutError, match="stop here"):
        RolloutWorker(
            lora.actor_rollout_ref,
            device=CPU,
            tokenizer=tiny_tokenizer(),
            actor=actor_of(lora),
        )
    assert seen == {"rank": 4}
