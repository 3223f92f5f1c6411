"""Environments: built-in ones, adapters for other libraries, and sessions."""

import asyncio
import importlib
import json
import logging
import math
import sys
import threading
import time
import types
from functools import partial

import numpy as np
import pytest
from pydantic import BaseModel, Field

from verl.agents.environments import (
    EnvironmentSession,
    GymEnvironment,
    Observation,
    SkyRLEnvironment,
    check_environment,
    environments,
    make_environment,
    open_environment,
)
from verl.agents.environments.base import UNREADABLE_ACTION, logged_info
from verl.agents.environments.gym_spaces import action_reader, observation_text
from verl.agents.environments.openenv import OpenEnvEnvironment
from verl.utils.errors import ConfigError, MissingDependencyError, RolloutError
from verl.utils.imports import is_installed
from verl.utils.logging import say_once


def play(environment, actions, timeout_s=30.0, **row):
    """Run an episode and return its session and observations."""

    async def main():
        async with EnvironmentSession(lambda: environment, timeout_s) as session:
            seen = [await session.reset(**row)]
            for action in actions:
                if not session.done:
                    seen.append(await session.step(action))
        return session, seen

    return asyncio.run(main())


def texts(observations: list[Observation]) -> list[str]:
    return [message["content"] for seen in observations for message in seen.messages]


# ---- built in ------------------------------------------------------------------------------------


def test_fewer_guesses_earn_a_higher_reward():
    rewards = {}
    for seed in range(40):
        game = make_environment("number_guessing", largest=64)
        low, high, turns, seen = 1, 64, 0, asyncio.run(game.reset(seed=seed))
        assert "from 1 to 64" in seen.messages[0]["content"]
        while not seen.done:
            turns += 1
            middle = (low + high) // 2
            seen = asyncio.run(game.step(f"I guess {middle}"))
            if seen.messages[0]["content"] == "higher":
                low = middle + 1
            else:
                high = middle - 1
        rewards[turns] = seen.reward
        assert seen.info == {"turns": turns, "solved": 1.0}
    ordered = [rewards[turns] for turns in sorted(rewards)]

    assert len(ordered) > 2
    assert ordered == sorted(ordered, reverse=True)


def test_guesses_run_out_and_the_seed_decides_the_secret():
    session, seen = play(
        make_environment("number_guessing", max_turns=4), ["no", "9" * 5000, "8.5", "-5"], seed=1
    )
    assert texts(seen)[1:] == ["Write a number."] * 3 + ["higher"]
    assert session.done
    assert seen[-1].reward == 0.0

    secrets = set()
    for seed in range(20):
        game = make_environment("number_guessing")
        asyncio.run(game.reset(seed=seed))
        first = game.secret
        asyncio.run(game.reset(seed=seed))
        assert game.secret == first
        secrets.add(first)
    assert len(secrets) > 10


def call(expression: object) -> str:
    arguments = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>\n{json.dumps(arguments)}\n</tool_call>"


ROW = {
    "extra_info": {"question": "What is 12 * 34?"},
    "reward_model": {"style": "rule", "ground_truth": "408"},
    "data_source": "calculator",
}


def test_the_calculator_answers_calls_and_rewards_the_last_turn():
    session, seen = play(make_environment("calculator"), [call("12 * 34"), "#### 408"], **ROW)
    assert texts(seen) == ["What is 12 * 34?", "408"]
    assert seen[1].messages[0]["role"] == "tool"
    assert (seen[-1].reward, seen[-1].done) == (1.0, True)
    assert seen[-1].info == {"turns": 2, "calls": 1}
    assert session.outcomes == {"ok": 5}  # one makes it


@pytest.mark.parametrize(
    ("actions", "reward"),
    [(["#### 407"], 0.0), ([""], 0.0), (["408"], 1.0), ([call("1 / 0"), "408"], 1.0)],
)
def test_the_calculator_scores_the_number_alone(actions, reward):
    _, seen = play(make_environment("calculator"), actions, **ROW)
    assert seen[-1].reward == reward


@pytest.mark.parametrize("action", [call("import os"), call(5), "<tool_call>{</tool_call>"])
def test_a_bad_call_is_answered_with_its_error(action):
    _, seen = play(make_environment("calculator", max_turns=1), [action], **ROW)
    assert texts(seen)[1].startswith("Error: ")
    assert seen[-1].done


def test_question_in_the_prompt_is_not_repeated():
    asked = [{"role": "user", "content": "What is 12 * 34?"}]
    row = {"raw_prompt": asked, "reward_model": {"ground_truth": "408"}}
    _, seen = play(make_environment("calculator"), [call("12 * 34"), "#### 408"], **row)
    assert texts(seen) == ["408"]
    assert seen[-1].reward == 1.0


def test_a_row_without_question_ends_the_episode():
    session, seen = play(make_environment("calculator"), [])
    assert session.failure is not None
    assert "needs a question and a ground_truth" in seen[0].info["error"]


# ---- sessions ------------------------------------------------------------------------------------


class Plain:
    """A user's environment with plain functions, all in one thread."""

    def __init__(self, fail_in: str = "", how: str = "raise") -> None:
        self.fail_in = fail_in
        self.how = how
        self.threads: list[int] = []
        self.closed = 0

    def _called(self, method: str) -> None:
        self.threads.append(threading.get_ident())
        if method == self.fail_in and self.how == "raise":
            raise ValueError("broken world")
        if method == self.fail_in:
            time.sleep(60)

    def reset(self, question):
        self._called("reset")
        return Observation([{"role": "user", "content": question}])

    def step(self, action):
        self._called("step")
        return Observation(reward=1.5, done=True)

    def close(self):
        self.closed += 1
        self._called("close")


def test_plain_functions_get_named_fields_and_share_a_thread():
    world = Plain()
    session, seen = play(world, ["go"], question="Where?", other="field")
    assert texts(seen) == ["Where?"]
    assert seen[-1].reward == 1.5
    assert len(world.threads) == 3
    assert len(set(world.threads)) == 1
    assert world.threads[0] != threading.get_ident()
    assert session.outcomes == {"ok": 4}  # one makes it


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize(("how", "outcome"), [("raise", "crashed"), ("hang", "timeout")])
def test_failure_ends_closes_and_counts_the_episode(method, how, outcome, caplog):
    world = Plain(method, how)
    with caplog.at_level(logging.WARNING, logger="verl"):
        session, seen = play(world, ["go"], timeout_s=0.2, question="Where?")
    assert (seen[-1].done, seen[-1].reward, seen[-1].messages) == (True, 0.0, [])
    assert seen[-1].info["outcome"] == outcome
    assert f"Plain.{method}" in seen[-1].info["error"]
    assert session.outcomes[outcome] == 1
    assert world.closed == 1


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_an_episode_counts_though_its_close_fails(how, caplog):
    say_once.cache_clear()
    world = Plain("close", how)
    with caplog.at_level(logging.WARNING, logger="verl"):
        _, seen = play(world, ["go"], timeout_s=0.2, question="Where?")
    assert (seen[-1].done, seen[-1].reward) == (True, 1.5)
    assert "Plain.close" in caplog.text
    assert "count all the same, but what they hold may not be freed" in caplog.text
    assert "end there" not in caplog.text


def test_a_cancelled_episode_still_closes():
    world = Plain()

    async def main():
        async def episode():
            async with EnvironmentSession(lambda: world, 30.0) as session:
                await session.reset(question="Where?")
                await asyncio.sleep(60)

        task = asyncio.create_task(episode())
        while not world.threads:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert world.closed == 1


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        (("obs", 1.0, True, {}), "must return a verl.agents.environments.Observation, got tuple"),
        (
            ("obs", 1.0, True, {}),
            r"must return .* sets verl_adapter = 'gym'; environment.name=open",
        ),
        (Observation(["hello"]), "must return messages such as"),  # pyright: ignore
        (Observation([], None), "must return a finite reward, got None"),  # pyright: ignore
        (Observation([], math.nan), "must return a finite reward, got nan"),
        (Observation([], 10**400), "must return a finite reward, got 1000"),
        (Observation([], np.ones(2)), r"must return a finite reward, got array\(\[1"),  # pyright: ignore
        (Observation("hello"), "must return .* a list as messages, got str"),  # pyright: ignore
        (
            Observation([{"role": "user"}]),
            "must return messages with a text as content, got .*would read",
        ),
        (
            Observation([{"role": "user", "text": "Hi"}]),
            "must return messages with a text as content",
        ),
        (Observation([], 1.0, "false"), "must return True or False as done, got 'false'"),  # pyright: ignore
        (Observation([], True, 1.0), "must return .*got 1.0. The fields .* in this order"),  # pyright: ignore
        (Observation(None), "must return .* a list as messages, got NoneType"),  # pyright: ignore
        (Observation([], info=[1]), "must return .* a dict as info, got list"),  # pyright: ignore
        (Observation([], rewards=None), "must return .* a dict as rewards, got"),  # pyright: ignore
    ],
)
def test_invalid_result_is_shown_in_the_error(value, fact):
    class Odd(Plain):
        def step(self, action):
            return value

    with pytest.raises(RolloutError, match=f"Odd.step {fact}"):
        play(Odd(), ["go"], question="Where?")


def test_numbers_truth_values_and_texts_of_info_are_logged():
    info = {
        "solved": True,
        "score": np.float32(0.5),
        "steps": np.int64(3),
        "won": np.bool_(False),
        "place": "b7",
        7: 1,
        "board": np.zeros(4),
        "moves": [1, 2],
        "inf": math.inf,
        "huge": 10**400,
        "nothing": None,
        UNREADABLE_ACTION: 1.0,
    }
    numbers = {"solved": 1.0, "score": 0.5, "steps": 3.0, "won": 0.0, "7": 1.0}
    assert logged_info(info) == {**numbers, "place": "b7"}


def test_no_step_after_the_end():
    async def main():
        async with EnvironmentSession(Plain, 30.0) as session:
            await session.reset(question="Where?")
            await session.step("go")
            await session.step("more")

    with pytest.raises(RolloutError, match="episode in Plain is over"):
        asyncio.run(main())


# ---- names and users' classes --------------------------------------------------------------------

GYM_FILE = """
class Counter:
    verl_adapter = "gym"

    def __init__(self, target=2):
        self.target = target

    def reset(self, *, seed=None, options=None):
        self.count = seed
        return f"at {seed}, asked {options['question']}", {"fresh": 1}

    def step(self, action):
        self.count += int(action)
        return f"at {self.count}", float(self.count), self.count >= self.target, False, {}

class Sky:
    def init(self, prompt):
        return prompt + [{"role": "user", "content": "begin"}], {}

    def step(self, action):
        return {"observations": [], "reward": 2, "done": True, "metadata": {"said": action}}
"""


def test_user_class_with_the_gym_interface(tmp_path):
    (tmp_path / "worlds.py").write_text(GYM_FILE)
    world = make_environment(f"{tmp_path}/worlds.py:Counter", target=3)
    _, seen = play(world, ["1", "1"], seed=1, question="Where?")
    assert texts(seen) == ["at 1, asked Where?", "at 2", "at 3"]
    assert [step.reward for step in seen] == [0.0, 2.0, 3.0]
    assert [step.done for step in seen] == [False, False, True]
    assert seen[0].info == {"fresh": 1}


def test_user_class_with_the_skyrl_interface(tmp_path):
    (tmp_path / "worlds.py").write_text(GYM_FILE)
    world = make_environment(str(tmp_path / "worlds.py") + ":Sky")
    _, seen = play(world, ["hello"], raw_prompt=[{"role": "system", "content": "Be brief."}])
    assert texts(seen) == ["begin"]
    assert not seen[0].replaces_prompt
    assert (seen[1].reward, seen[1].done, seen[1].info) == (2.0, True, {"said": "hello"})


def test_an_opening_that_rewrites_the_prompt_replaces_it():
    class Rewriting:
        def init(self, prompt):
            return [{"role": "system", "content": "Be brief."}, *prompt], {}

    asked = [{"role": "user", "content": "Hi"}]
    _, seen = play(SkyRLEnvironment(Rewriting()), [], raw_prompt=asked)
    assert texts(seen) == ["Be brief.", "Hi"]
    assert seen[0].replaces_prompt


def test_environment_is_created_in_its_thread_with_a_deadline(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import threading, time\n"
        "from verl.agents.environments import Observation\n"
        "class Slow:\n"
        "    def __init__(self, seconds):\n"
        "        time.sleep(seconds)\n"
        "        self.made_in = threading.get_ident()\n"
        "    def reset(self):\n"
        "        same = self.made_in == threading.get_ident()\n"
        "        return Observation([{'role': 'user', 'content': str(same)}])\n"
        "    def step(self, action):\n"
        "        return Observation([], done=True)\n"
    )

    async def main(seconds):
        name = f"{tmp_path}/slow.py:Slow"
        async with open_environment(name, {"seconds": seconds}, timeout_s=0.5) as session:
            return await session.reset(), session

    quick, _ = asyncio.run(main(0))
    assert texts([quick]) == ["True"]

    late, session = asyncio.run(main(30))
    assert (late.done, late.info["outcome"]) == (True, "timeout")
    assert session.outcomes == {"timeout": 1}


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("number_gessing", "Unknown environment 'number_gessing'. Nearest known: number_guessing"),
        ("pathlib:Path", "it lacks reset, step"),
        ("no.py:World", r"agent.environment.name: expected a Python file at 'no\.py', found none"),
    ],
)
def test_unknown_environment_error_lists_the_known_ones(name, fact):
    with pytest.raises(ConfigError, match=fact):
        open_environment(name, {}, timeout_s=30.0)


def test_a_registered_environment_is_found_by_name():
    @environments.register("test_world")
    def make(**config):
        return Plain(**config)

    try:
        assert make_environment("test_world", how="hang").how == "hang"
    finally:
        environments.remove("test_world")


# ---- adapters ------------------------------------------------------------------------------------


class OldGym:
    """The four-tuple of older gym, and a reset without info."""

    def reset(self):
        return "ready"

    def step(self, action):
        return None if action == "end" else {"text": action}, 1, action == "end", {"n": 1}


def test_older_gym_and_observations_that_need_a_text():
    world = GymEnvironment(OldGym(), as_text=lambda seen: seen if isinstance(seen, str) else "?")
    _, seen = play(world, ["on", "end"])
    assert texts(seen) == ["ready", "?"]
    assert seen[-1].done
    assert seen[-1].info == {"n": 1, "truncated": 0.0}

    session, seen = play(GymEnvironment(OldGym()), ["on"])
    assert "must observe a text or a list of messages, got dict" in seen[-1].info["error"]
    assert session.outcomes["crashed"] == 1


def test_other_tuples_are_an_error():
    class Short(OldGym):
        def step(self, action):
            return "seen", 1.0

    session, _ = play(GymEnvironment(Short()), ["on"])
    assert session.failure is not None
    assert "Short.step must return (observation, reward, terminated" in session.failure.error


def test_skyrl_without_a_field_is_an_error():
    class Short:
        def init(self, prompt):
            return prompt, {}

        def step(self, action):
            return {"observations": [], "reward": 0.0}

    session, _ = play(SkyRLEnvironment(Short()), ["on"], prompt=[])
    assert session.failure is not None
    assert "'done' is missing" in session.failure.error


class Discrete:
    """The attributes of gymnasium's space of this name."""

    def __init__(self, n, start=0):
        self.n = n
        self.start = start


class Corridor:
    """A world of gymnasium's registry: it observes numbers and acts on the number of a choice."""

    render_mode = None
    action_space = Discrete(2, start=1)

    def reset(self, *, seed=None, options=None):
        self.taken = []
        return np.int64(4), {}

    def step(self, action):
        self.taken.append(action)
        return (np.int64(3), np.float32(0.1), {"left": False}), 1.0, len(self.taken) == 2, False, {}

    def render(self):
        return "S..G"


def registered(world):
    """Return the adapter that `gym` makes of a world with an id."""
    reads = action_reader(world)
    return GymEnvironment(world, as_text=partial(observation_text, world), as_action=reads)


def test_a_registered_world_shows_numbers_and_takes_the_number_of_a_choice():
    world = Corridor()
    endless = "1" * 5000  # more digits than Python reads
    _, seen = play(registered(world), ["up", "3", endless, "1.2", "I choose 2", "not 2 but 1."])
    sorry = "Answer with a whole number from 1 to 2."
    assert texts(seen) == ["4", sorry, sorry, sorry, sorry, *['[3, 0.1, {"left": false}]'] * 2]
    assert world.taken == [2, 1]
    assert [step.reward for step in seen] == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    assert seen[1].info == {"unreadable_action": 1.0}
    assert seen[-1].done

    world.render_mode = "ansi"
    assert texts(play(registered(world), ["1"])[1]) == ["S..G", "S..G"]


def test_worlds_without_a_text_are_refused_with_the_way_out():
    world = Corridor()
    world.action_space = "Box(-2.0, 2.0)"
    with pytest.raises(RolloutError, match=r"Corridor takes actions of Box.*as_action=\.\.\."):
        action_reader(world)
    for observation in (np.zeros((8, 9)), object()):
        with pytest.raises(RolloutError, match=r"up to 64 numbers, got .*as_text=\.\.\."):
            observation_text(world, observation)
    assert observation_text(world, np.zeros(64))


def test_an_array_at_the_end_of_an_episode_is_no_empty_text():
    class Cart(Corridor):
        def step(self, action):
            return np.array([0.5, 1 / 3]), 1.0, True, False, {}

    assert texts(play(registered(Cart()), ["1"])[1]) == ["4", "[0.5, 0.333333]"]


def test_gymnasiums_own_worlds_play():
    pytest.importorskip("gymnasium", reason="pip install gymnasium")
    for config, opening in (
        ({"env": "FrozenLake-v1", "is_slippery": False}, "0"),
        ({"env": "FrozenLake-v1", "render_mode": "ansi"}, "\n\x1b[41mS\x1b[0mFFF"),
        ({"env": "Blackjack-v1"}, "["),
        ({"env": "CartPole-v1"}, "["),
    ):
        check_environment("gym", config)
        session, seen = play(make_environment("gym", **config), ["1"] * 9, seed=2**32 - 1)
        assert session.failure is None
        assert texts(seen)[0].startswith(opening)

    for config, fact in (
        ({"env": "FrozenLke-v1"}, "gymnasium cannot make 'FrozenLke-v1'"),
        ({"env": "FrozenLake-v1", "size": 4}, "unexpected keyword argument 'size'"),
        ({"env": "Pendulum-v1"}, "takes actions of Box"),
    ):
        with pytest.raises(ConfigError, match=fact):
            check_environment("gym", config)


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


@pytest.mark.parametrize(
    ("name", "package", "config"),
    [
        ("gym", "gymnasium", {"env": "FrozenLake-v1"}),
        ("skyrl", "skyrl-gym", {"env": "gsm8k"}),
        (
            "openenv",
            "openenv",
            {"base_url": "http://localhost:1", "observation_field": "a", "action_field": "b"},
        ),
    ],
)
def test_a_missing_library_is_named_with_its_install_command(name, package, config):
    if is_installed(package):
        pytest.skip(f"{package} is installed here")
    with pytest.raises(MissingDependencyError, match=f"pip install {package}"):
        make_environment(name, **config)
    with pytest.raises(MissingDependencyError, match=f"pip install {package}"):
        check_environment(name, config)


@pytest.mark.parametrize(
    ("name", "config", "fact"),
    [
        (
            "openenv",
            {},
            "environment 'openenv' do not fit: missing a required argument: 'base_url'",
        ),
        ("calculator", {"turns": 3}, "do not fit: got an unexpected keyword argument 'turns'"),
        ("gym", {"env": 5}, "an id of gymnasium, got 5"),
        ("skyrl", {"env": 5}, "an id of skyrl_gym, got 5"),
        ("gym", {"env": "worlds.py:Missing"}, "Python file at 'worlds.py', found none"),
    ],
)
def test_keywords_are_checked_before_an_episode(name, config, fact):
    with pytest.raises(ConfigError, match=fact):
        check_environment(name, config)
    check_environment("calculator", {"max_turns": 3})


def test_packages_of_an_environment_are_named_before_an_episode(tmp_path, monkeypatch):
    def make(name, **config):
        importlib.import_module("a_package_that_is_missing")

    library = types.SimpleNamespace(make=make, GenericEnvClient=object)
    monkeypatch.setitem(sys.modules, "skyrl_gym", library)
    monkeypatch.setitem(sys.modules, "openenv.core", library)
    file = tmp_path / "actions.py"
    file.write_text("import a_package_that_is_missing\n")
    asked = {"base_url": "http://localhost:1", "observation_field": "a", "action_field": "b"}

    message = "package 'a_package_that_is_missing' is not installed"
    with pytest.raises(MissingDependencyError, match=f"environment 'search'.*{message}"):
        check_environment("skyrl", {"env": "search"})
    with pytest.raises(MissingDependencyError, match=rf"actions\.py', line 1.*{message}"):
        check_environment("openenv", {**asked, "action_class": f"{file}:Action"})


def test_a_file_without_its_class_is_an_error():
    with pytest.raises(ConfigError, match=r"must be 'file\.py:Class'.*, got 'countdown\.py'"):
        check_environment("countdown.py", {})
