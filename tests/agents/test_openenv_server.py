"""OpenEnv's own server and clients, where the package is installed.

Its clients speak WebSocket with messages of their own, so no server of the tests stands in for it.
"""

import asyncio
import contextlib
import threading
import time

import pytest

from tests.agents.environment_episodes import play, texts
from verl.agents.environments import check_environment, make_environment
from verl.agents.environments.openenv import OpenEnvEnvironment
from verl.utils.errors import ConfigError

pytest.importorskip("openenv.core", reason="pip install openenv")

import uvicorn
from openenv.core import EnvClient, GenericEnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

HERE = "tests.agents.test_openenv_server"


class Said(Action):
    message: str = Field(max_length=5)
    loud: bool = True


class Heard(Observation):
    text: str


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, **fields):
        return Heard(text=f"{seed} {fields}")

    def step(self, action, **_):
        if action.message == "sleep":
            time.sleep(1.0)
        text = action.message.upper() if action.loud else action.message
        return Heard(text=text, reward=1.0, done=action.message != "more", metadata={"words": 1})


class EchoClient(EnvClient):
    """A client as packages of environments bring it: of typed actions, with plain results."""

    def _step_payload(self, action):
        return action.model_dump()

    def _parse_result(self, payload):
        return StepResult(
            observation={"heard": payload["observation"]["text"]},
            reward=payload["reward"],
            done=payload["done"],
            metadata=payload.get("metadata"),
        )

    def _parse_state(self, payload):
        return payload


class Loud(EchoClient):
    """A client with a setting of its own."""

    def __init__(self, base_url, volume=1, **kwargs):
        super().__init__(base_url, **kwargs)
        self.volume = volume


@contextlib.contextmanager
def serving(num_sessions=4):
    """Serve the environment by OpenEnv's server. Yields its address and the headers of clients."""
    app = create_app(Echo, Said, Heard, env_name="echo", max_concurrent_envs=num_sessions)
    headers = []

    async def noting(scope, receive, send):
        if scope["type"] == "websocket":
            headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        await app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(noting, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)

    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", headers
    server.should_exit = True
    thread.join()


@pytest.fixture
def address():
    """Serve the environment and yield its address."""
    with serving() as (address, _):
        yield address


def made(address, **more):
    """Check and make the environment."""
    config = {"base_url": address, "observation_field": "text", "action_field": "message", **more}
    check_environment("openenv", config)
    return make_environment("openenv", **config)


def test_openenvs_own_server_and_client(address):
    _, seen = play(made(address, reset_fields="task"), ["hello"], seed=3, task="t7")
    assert texts(seen) == ["3 {'task': 't7'}", "HELLO"]
    assert (seen[-1].reward, seen[-1].done) == (1.0, True)

    _, seen = play(made(address), ["too long", "short"])
    refused = (
        "The environment refused this answer: it does not have the type of the action's 'message'."
    )
    assert texts(seen)[1:] == [refused, "SHORT"]
    assert seen[1].info == {"unreadable_action": 1.0}


def test_flags_and_metadata_of_the_server_arrive(address):
    _, seen = play(made(address, action_fields={"loud": False}), ["more", "end"])
    assert texts(seen)[1:] == ["more", "end"]
    assert [each.done for each in seen] == [False, False, True]
    assert seen[1].info == {"words": 1}


def test_classes_of_an_environment_for_its_client_and_its_actions(address):
    classes = {"client_class": f"{HERE}.EchoClient", "action_class": f"{HERE}.Said"}
    _, seen = play(made(address, observation_field="heard", **classes), ["too long", "short"])
    assert "at most 5 characters" in texts(seen)[1]
    assert texts(seen)[2] == "SHORT"
    assert seen[2].info == {"words": 1}, "also where the observation has no metadata"


def test_settings_reach_the_client(address):
    session, _ = play(made(address, message_timeout_s=0.2), ["sleep"])
    assert session.failure is not None
    assert "TimeoutError" in session.failure.error

    with serving() as (noting, headers):
        play(made(noting, headers={"X-Team": "a"}), ["hello"])
    assert headers[0]["x-team"] == "a"

    world = made(address, client_class=f"{HERE}.Loud", volume=7)
    assert world.unwrapped.volume == 7


@pytest.mark.parametrize(
    ("setting", "nearest"),
    [
        ("message_timeout", "message_timeout_s"),
        ("header", "headers"),
        ("reset_field", "reset_fields"),
    ],
)
@pytest.mark.parametrize("client_class", [None, f"{HERE}.EchoClient"])
def test_a_setting_that_no_client_takes_is_named_before_an_episode(setting, nearest, client_class):
    message = f"unknown key '{setting}'. Nearest known: {nearest}"
    with pytest.raises(ConfigError, match=message):
        made("http://127.0.0.1:1", client_class=client_class, **{setting: 1})


def test_a_synchronous_client_may_be_passed(address):
    client = GenericEnvClient(base_url=address).sync()
    world = OpenEnvEnvironment(client, observation_field="text", action_field="message")
    _, seen = play(world, ["hello"], seed=3)
    assert texts(seen) == ["3 {}", "HELLO"]


def test_a_full_server_names_the_limits():
    with serving(num_sessions=1) as (address, _):

        async def fill():
            async with GenericEnvClient(base_url=address) as first:
                await first.reset()
                return await asyncio.to_thread(play, made(address), ["hello"])

        session, _ = asyncio.run(fill())
    assert session.failure is not None
    assert "max_concurrent_envs" in session.failure.error


def test_an_address_without_a_server_is_named():
    session, _ = play(made("http://127.0.0.1:1"), ["hello"])
    assert session.failure is not None
    assert "Failed to connect to ws://127.0.0.1:1/ws" in session.failure.error
