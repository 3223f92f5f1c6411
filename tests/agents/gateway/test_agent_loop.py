"""The gateway as an agent loop of a run."""

import re
import threading
from pathlib import Path

import pytest

from tests.agents.gateway.stand_ins import END, client_of
from tests.agents.gateway.test_loop import AGENTS
from tests.rollout.engines import make_engine
from tests.tiny_models import tiny_model, tiny_tokenizer
from verl.agents.loops import Episode
from verl.agents.runner import AgentRunner
from verl.config.gateway import GatewayConfig
from verl.config.load import load_config
from verl.config.rollout import RolloutConfig
from verl.rollout import assemble
from verl.rollout.trajectory import DROPPED_BECAUSE
from verl.utils.errors import ConfigError

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("at_once", [1, 4])
def test_episodes_of_a_batch_become_rows(tmp_path: Path, at_once: int):
    file = tmp_path / "agents.py"
    file.write_text(AGENTS)
    config = RolloutConfig(prompt_length=64, response_length=128, max_model_len=256)
    config.stop_token_ids = [END]
    config.agent.gateway = GatewayConfig(path=str(file), name="failing")
    config.agent.max_episodes = at_once
    assert config.uses_agents
    assert config.agent_loop == "gateway_agent"

    tokenizer = tiny_tokenizer()
    runner = AgentRunner(config, tokenizer)
    prompt_ids = runner.context.boundary.prompt(MESSAGES)
    episodes = []
    for row in range(4):
        fields = {"question": f"q{row}"}
        episodes.append(Episode(row=row, messages=MESSAGES, prompt_ids=prompt_ids, fields=fields))

    before = _threads_of_agents()
    engine = make_engine(tiny_model("qwen2"), max_model_len=256)
    for _ in range(2):  # a gateway for each batch
        played = runner.play(episodes, client_of(engine))
        assert [each.row for each in played] == [0, 1, 2, 3]
        assert [each.is_dropped for each in played] == [False, True, False, False]
        failure = played[1].extra[DROPPED_BECAUSE]
        assert re.fullmatch(r"failing raised KeyError \(.*agents.py:\d+\): 'no such tool'", failure)
        metrics = runner.metrics()
        assert metrics["agent_loop/gateway/finished"] == 3
        assert metrics["agent_loop/gateway/failed/error"] == 1
        assert metrics["agent_loop/dropped"] == 1

        columns = assemble(played, prompt_length=64, response_length=128, pad_token_id=0)
        trained = columns["response_mask"].sum(dim=1)
        assert trained[1] == 0, "nothing of a failed session is learned"
        assert [float(each) for each in trained[[0, 2, 3]]] == [
            played[row].reward for row in (0, 2, 3)
        ]
    (thread,) = _threads_of_agents() - before  # one for all batches
    runner.close()
    thread.join(timeout=10)
    assert not thread.is_alive()


def _threads_of_agents() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "verl-agents"}


@pytest.mark.parametrize(
    ("name", "settings", "failure"),
    [
        ("wrong", {}, "must return a finite number"),
        ("silent", {}, "its agent got no reply of the model"),
        ("slow", {"timeout_s": 1.0}, "slow did not answer within 1 s"),
        ("slow", {"idle_s": 0.3}, "it sent no request for 0.3 s"),
    ],
)
def test_a_dropped_episode_carries_its_cause(tmp_path: Path, caplog, name, settings, failure):
    file = tmp_path / "agents.py"
    file.write_text(AGENTS)
    config = RolloutConfig(prompt_length=64, response_length=128, max_model_len=256)
    config.agent.gateway = GatewayConfig(path=str(file), name=name, **settings)
    runner = AgentRunner(config, tiny_tokenizer())
    prompt_ids = runner.context.boundary.prompt(MESSAGES)
    episode = Episode(row=0, messages=MESSAGES, prompt_ids=prompt_ids, fields={"question": "q"})

    engine = make_engine(tiny_model("qwen2"), max_model_len=256)
    (played,) = runner.play([episode], client_of(engine))
    assert played.is_dropped
    assert failure in played.extra[DROPPED_BECAUSE]
    (warning,) = caplog.messages  # one line, not one of the gateway and one of the runner
    assert re.match(rf"agents: sample 0 is dropped: .*{failure}", warning)


def test_one_agent_alone_can_be_named():
    agent = "actor_rollout_ref.rollout.agent.gateway"
    argv = ["data.dataset_name=toy", "actor_rollout_ref.model.path=toy", "data.train_batch_size=4"]
    with pytest.raises(ConfigError, match="both name an agent"):
        load_config([*argv, f"{agent}.path=a.py", f"{agent}.command=b"])
    config = load_config([*argv, f"{agent}.path=a.py"])
    assert config.actor_rollout_ref.rollout.uses_agents
