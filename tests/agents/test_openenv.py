"""Environments that servers of OpenEnv hold."""

import threading
import time

import pytest
from pydantic import BaseModel, Field

from tests.agents.environment_episodes import play, texts
from verl.agents.environments import check_environment, make_environment
from verl.agents.environments.openenv import OpenEnvEnvironment


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


@pytest.fixture
def openenv_server():
    """Serve an echo environment by OpenEnv's own server. Gives its address."""
    pytest.importorskip("openenv.core", reason="pip install openenv")
    import uvicorn
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Said(Action):
        message: str = Field(max_length=5)

    class Heard(Observation):
        text: str

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        state = State()

        def reset(self, seed=None, episode_id=None, **fields):
            return Heard(text=f"{seed} {fields}")

        def step(self, action, **_):
            return Heard(text=action.message.upper(), reward=1.0, done=True)

    app = create_app(Echo, Said, Heard, env_name="echo", max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_openenvs_own_server_and_client(openenv_server):
    config = {
        "base_url": openenv_server,
        "observation_field": "text",
        "action_field": "message",
        "reset_fields": "task",
    }
    check_environment("openenv", config)
    _, seen = play(make_environment("openenv", **config), ["hello"], seed=3, task="t7")
    assert texts(seen) == ["3 {'task': 't7'}", "HELLO"]
    assert (seen[-1].reward, seen[-1].done) == (1.0, True)

    _, seen = play(make_environment("openenv", **config), ["too long", "short"])
    refused = (
        "The environment refused this answer: it does not have the type of the action's 'message'."
    )
    assert texts(seen)[1:] == [refused, "SHORT"]
    assert seen[1].info == {"unreadable_action": 1.0}


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
