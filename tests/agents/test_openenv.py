"""Environments that servers of OpenEnv hold."""

import sys
import types

import pytest
from pydantic import BaseModel

from tests.agents.environment_episodes import play, texts
from verl.agents.environments import check_environment
from verl.agents.environments.openenv import OpenEnvEnvironment
from verl.utils.errors import ConfigError


class EchoClient:
    """OpenEnv's client interface without its network."""

    class Result:
        def __init__(self, observation, reward=None, done=False):
            self.observation = observation
            self.reward = reward
            self.done = done

    def __init__(self):
        self.log = []

    async def __aenter__(self):
        self.log.append("connect")
        return self

    async def reset(self, seed=None):
        self.log.append(f"reset {seed}")
        return self.Result({"text": "ready"})

    async def step(self, action):
        self.log.append(action)
        return self.Result({"text": action["message"].upper()}, 1.0, True)

    async def close(self):
        self.log.append("close")


def test_openenv_action_and_observation_fields():
    client = EchoClient()
    world = OpenEnvEnvironment(
        client, observation_field="text", action_field="message", action_fields={"loud": True}
    )
    _, seen = play(world, ["hello"], seed=3, data_source="x")
    assert texts(seen) == ["ready", "HELLO"]
    assert (seen[0].reward, seen[1].reward, seen[1].done) == (0.0, 1.0, True)
    assert client.log == ["connect", "reset 3", {"loud": True, "message": "hello"}, "close"]


class ToolClient(EchoClient):
    """An environment of OpenEnv whose actions are calls of a tool."""

    async def reset(self, **fields):
        self.log.append(fields)
        return self.Result({"metadata": {}})

    async def step(self, action):
        self.log.append(action)
        said = action["arguments"]["message"]
        if not said:
            error = {"message": "Say something."}
            return self.Result({"result": None, "error": error, "metadata": {"words": 0}})
        return self.Result({"result": {"data": said}, "error": None})


def test_openenv_fields_within_others_and_fields_of_the_row():
    client = ToolClient()
    world = OpenEnvEnvironment(
        client,
        observation_field=["result.data", "error.message"],
        action_field="arguments.message",
        action_fields={"type": "call_tool", "arguments": {"loud": True}},
        reset_fields=["task"],
    )
    _, seen = play(world, ["hello", ""], seed=3, task="t7", other=1)
    assert texts(seen) == ["hello", "Say something."]
    assert seen[2].info == {"words": 0}
    assert client.log[1] == {"seed": 3, "task": "t7"}
    assert client.log[2] == {"type": "call_tool", "arguments": {"loud": True, "message": "hello"}}

    world = OpenEnvEnvironment(
        ToolClient(), observation_field="result", action_field="arguments.message"
    )
    session, _ = play(world, ["hello"])
    assert "must be a text in the observation, got dict. Fields: data." in session.failure.error


class NumberAction(BaseModel):
    number: int
    speed: int = 1


def test_a_text_that_openenvs_action_class_refuses_is_answered_to_the_model():
    class NumberClient(EchoClient):
        async def step(self, action):
            return self.Result({"text": f"got {action.number}"})

    def world(**action):
        return OpenEnvEnvironment(
            NumberClient(), observation_field="text", action_class=NumberAction, **action
        )

    _, seen = play(world(action_field="number"), ["seven", "7"])
    assert texts(seen)[1].startswith("The environment refused this answer: Input should be a valid")
    assert texts(seen)[2] == "got 7"
    assert seen[1].info == {"unreadable_action": 1.0}

    for wrong in ({"action_field": "digit"}, {"action_field": "speed"}):
        session, _ = play(world(**wrong), ["7"])
        assert session.failure is not None
        assert "number" in session.failure.error


@pytest.mark.parametrize(
    ("flags", "ends"),
    [
        ({"done": True}, True),
        ({"done": None}, False),
        ({"done": 0, "truncated": 1}, True),
        ({"truncated": None}, False),
    ],
)
def test_either_flag_ends_an_episode(flags, ends):
    class FlagClient(EchoClient):
        async def step(self, action):
            result = self.Result({"text": "seen"})
            vars(result).update(flags)
            return result

    world = OpenEnvEnvironment(FlagClient(), observation_field="text", action_field="message")
    _, seen = play(world, ["a", "b"])
    assert seen[1].done is ends
    assert len(seen) == (2 if ends else 3)


@pytest.mark.parametrize("name", ["done", "truncated"])
def test_a_flag_that_is_no_truth_value_is_named(name):
    class WordClient(EchoClient):
        async def step(self, action):
            result = self.Result({"text": "seen"})
            setattr(result, name, "no")
            return result

    world = OpenEnvEnvironment(WordClient(), observation_field="text", action_field="message")
    session, _ = play(world, ["a"])
    assert session.failure is not None
    message = f"WordClient must return True or False as {name}, got 'no'"
    assert message in session.failure.error


def test_a_full_server_of_openenv_names_the_limits():
    class FullClient(EchoClient):
        async def reset(self, **fields):
            raise RuntimeError("Server error: 1/1 sessions active. (code: CAPACITY_REACHED)")

    world = OpenEnvEnvironment(FullClient(), observation_field="text", action_field="message")
    session, _ = play(world, [])
    assert session.failure is not None
    assert "max_concurrent_envs" in session.failure.error
    assert "rollout.agent.max_episodes" in session.failure.error


def test_openenv_error_lists_the_fields():
    world = OpenEnvEnvironment(EchoClient(), observation_field="message", action_field="message")
    session, _ = play(world, [])
    assert session.failure is not None
    assert "observation_field 'message' must be a text" in session.failure.error
    assert "Fields: text" in session.failure.error


def test_metadata_next_to_the_observation_become_the_info():
    class TypedClient(EchoClient):
        async def step(self, action):
            result = self.Result({"text": "seen"})
            result.metadata = {"words": 1}
            return result

    world = OpenEnvEnvironment(TypedClient(), observation_field="text", action_field="message")
    _, seen = play(world, ["a"])
    assert seen[1].info == {"words": 1}


def test_a_synchronous_wrapper_connects_by_itself():
    """OpenEnv's wrapper passes other names on to its client, which then refuses calls of it."""

    class Wrapper:
        def __init__(self):
            self.client = EchoClient()

        def reset(self, **fields):
            return self.client.Result({"text": "ready"})

        def step(self, action):
            return self.client.Result({"text": action["message"]}, 1.0, True)

        def close(self):
            self.client.log.append("close")

        def __getattr__(self, name):
            return getattr(self.client, name)

    wrapper = Wrapper()
    world = OpenEnvEnvironment(wrapper, observation_field="text", action_field="message")
    _, seen = play(world, ["hello"])
    assert texts(seen) == ["ready", "hello"]
    assert wrapper.client.log == ["close"]


class SettledClient:
    """A client of OpenEnv that takes the settings of its own."""

    def __init__(self, base_url, message_timeout_s=60.0, headers=None):
        self.base_url = base_url


class FreeClient(SettledClient):
    """A client that passes settings on, as classes of environments may."""

    def __init__(self, base_url, **settings):
        super().__init__(base_url)


@pytest.mark.parametrize("client_class", [None, f"{SettledClient.__module__}.SettledClient"])
def test_a_setting_that_the_client_does_not_take_is_named_at_start(monkeypatch, client_class):
    library = types.SimpleNamespace(GenericEnvClient=SettledClient)
    monkeypatch.setitem(sys.modules, "openenv.core", library)
    config = {"base_url": "http://localhost:1", "observation_field": "a", "action_field": "b"}
    config["client_class"] = client_class
    check_environment("openenv", {**config, "headers": {}, "reset_fields": "task"})

    message = (
        "client SettledClient: unknown key 'message_timeout'. Nearest known: message_timeout_s"
    )
    with pytest.raises(ConfigError, match=message):
        check_environment("openenv", {**config, "message_timeout": 5})
    config["client_class"] = f"{FreeClient.__module__}.FreeClient"
    check_environment("openenv", {**config, "message_timeout": 5})
