"""Agents, their policies and their rewards: contradictions, and settings that nothing reads."""

from pathlib import Path
from typing import Any

import pytest

from tests.config.conftest import Load
from verl.config import config_from_dict
from verl.utils.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
AGENT = f"{ROLLOUT}.agent"
FUNCTION = "custom_reward_function.path=reward.py"
WORLD = f"{AGENT}.environment.name=calculator"
GIVEN = f"{AGENT}.gives_reward=True"
LOOP = f"{AGENT}.default_agent_loop=mine"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("multi_turn.enable=True", "multi_turn.enable=True needs something that answers"),
        (
            "agent.environment.name=number_guessing multi_turn.tool_config_path=tools.yaml",
            "tools and interactions would never be reached. Leave either out",
        ),
        (
            "agent.default_agent_loop=single_turn_agent multi_turn.function_tool_path=tools.py",
            "Set it to tool_agent, or leave it out",
        ),
        ("agent.replay_path=a agent.record_path=b", "or record anew"),
        ("agent.record_path=a", "record_path=a needs tools, got none. Set multi_turn.tool"),
    ],
)
def test_unanswered_turns_are_an_error(build: Load, overrides: str, message: str):
    with pytest.raises(ConfigError, match=message):
        build(*(f"{ROLLOUT}.{override}" for override in overrides.split()))


def with_judge(**judge: Any) -> dict[str, Any]:
    policies = {"player": {"trained": True}, "judge": judge}
    agent = {"policies": policies, "environment": {"name": "debate.py:Debate"}}
    return {
        "actor_rollout_ref": {"model": {"path": "a/model"}, "rollout": {"agent": agent}},
        "data": {"train_files": "train.parquet", "train_batch_size": 8},
    }


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ({"trained": True, "url": "http://h"}, "a server's policy is not trained"),
        ({"trained": True, "path": "self"}, "path=self, which is a frozen copy. Leave path out"),
        ({"path": "a/b", "lr": 1e-6}, "judge.lr=1e-06 needs trained=true and a path"),
        ({}, "judge needs one of trained=true .*, got none"),
        ({"path": "a/b", "url": "http://h"}, "needs one of .*, got path and url"),
        ({"url": "http://h"}, "needs the name that the server has for its model"),
        ({"path": "a/b", "model": "m"}, "read together with url only"),
        ({"path": "self"}, "belong together, got path=self and update_freq=None"),
        ({"path": "a/b", "update_freq": 2}, "belong together, got path=a/b and update_freq=2"),
        ({"path": "a/b", "top_p": 0}, r"policies.judge.top_p must be above 0.*got 0.0"),
        ({"path": "a/b", "max_new_tokens": 0}, "judge.max_new_tokens must be above 0, got 0"),
        ({"paths": "a/b"}, "policies expects {role: .* with the keys trained, path"),
    ],
)
def test_policies_of_roles_that_cannot_play_are_an_error(judge: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(with_judge(**judge))


def test_copies_of_the_actor_need_whole_weights_and_matching_checkpoints():
    given = with_judge(path="self", update_freq=3)
    given["trainer"] = {"save_freq": 6, "mode": "one_step_off"}
    with pytest.raises(ConfigError, match=r"trainer.mode=one_step_off does not.*Set it to sync"):
        config_from_dict(given)
    given["trainer"] = {"save_freq": 4}
    with pytest.raises(ConfigError, match=r"update_freq=3 must divide trainer.save_freq=4"):
        config_from_dict(given)
    given["trainer"] = {"save_freq": 6}
    config_from_dict(given)


def test_policies_without_a_loop_or_a_trained_role_are_an_error():
    given = with_judge(path="a/b")
    given["actor_rollout_ref"]["rollout"]["agent"].pop("environment")
    with pytest.raises(ConfigError, match="policies needs an agent loop with roles"):
        config_from_dict(given)
    given = with_judge(path="a/b")
    given["actor_rollout_ref"]["rollout"]["agent"]["policies"].pop("player")
    with pytest.raises(ConfigError, match="names no role that the actor plays, got judge"):
        config_from_dict(given)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("trainer", "mode", "one_step_off"),
        ("algorithm", "adv_estimator", "reinforce_plus_plus"),
        ("algorithm", "use_kl_in_reward", True),
        ("algorithm", "use_pf_ppo", True),
        ("critic", "enable", True),
    ],
)
def test_a_second_trained_policy_names_the_features_that_it_lacks(
    section: str, key: str, value: Any
):
    given = with_judge(trained=True, path="a/b", lr=1e-6)
    given["actor_rollout_ref"]["rollout"]["n"] = 2
    given["algorithm"] = {"adv_estimator": "grpo"}
    config_from_dict(given)
    given.setdefault(section, {})[key] = value
    message = rf"second trained policy, which does not support {section}.{key}={value}. Set it to"
    with pytest.raises(ConfigError, match=message):
        config_from_dict(given)


def test_settings_that_a_policy_does_not_read_have_no_effect(log: pytest.LogCaptureFixture):
    given = with_judge(path="a/b", temperature=0.5, timeout_s=10)
    policies = given["actor_rollout_ref"]["rollout"]["agent"]["policies"]
    policies["player"] |= {"temperature": 0.5, "max_new_tokens": 8, "update_freq": 2}
    config_from_dict(given)
    assert "policies.player: temperature, max_new_tokens, update_freq without effect" in log.text
    assert "policies.judge: timeout_s without effect" in log.text


@pytest.mark.parametrize("role", ["", "a/b", "a b"])
def test_a_second_trained_policy_has_a_role_that_can_name_a_folder(role: str):
    given = with_judge(path="a/b")
    given["actor_rollout_ref"]["rollout"]["n"] = 2
    given["algorithm"] = {"adv_estimator": "grpo"}
    policies = given["actor_rollout_ref"]["rollout"]["agent"]["policies"]
    policies[role] = {"trained": True, "path": "a/b"}
    with pytest.raises(ConfigError, match=f"got '{role}'. Use letters, digits, _ and - alone"):
        config_from_dict(given)


def test_a_reward_model_next_to_scores_of_agents_is_an_error(build: Load):
    with pytest.raises(ConfigError, match="would replace the scores that agent loops"):
        build(
            f"{ROLLOUT}.agent.environment.name=number_guessing",
            "reward_model.enable=True",
            "reward_model.model.path=a/model",
        )


def test_turn_settings_without_agents_have_no_effect(build: Load, log: pytest.LogCaptureFixture):
    build(f"{ROLLOUT}.multi_turn.max_assistant_turns=5")
    assert "multi_turn.max_assistant_turns=5 has no effect" in log.text
    build(f"{ROLLOUT}.mode=async", f"{ROLLOUT}.multi_turn.max_parallel_calls=4")
    assert "multi_turn.max_parallel_calls=4 has no effect: no tools are configured" in log.text


@pytest.mark.parametrize(
    ("overrides", "source"),
    [
        ([FUNCTION], None),
        ([WORLD], None),
        ([FUNCTION, LOOP], None),
        ([FUNCTION, WORLD], WORLD),
        ([FUNCTION, GIVEN, LOOP], GIVEN),
    ],
)
def test_a_reward_function_that_is_never_called_is_warned_of(
    build: Load,
    log: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    source: str | None,
):
    (tmp_path / "reward.py").touch()
    monkeypatch.chdir(tmp_path)
    build(*overrides)
    warned = [record.message for record in log.records if "is never called" in record.message]
    assert len(warned) == (source is not None)
    assert all(f"{FUNCTION} is never called" in line and str(source) in line for line in warned)
