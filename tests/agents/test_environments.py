"""Environments: built-in ones, users' classes, sessions, and checks before an episode."""

import asyncio
import importlib
import json
import logging
import math
import sys
import threading
import time
import types

import numpy as np
import pytest

from tests.agents.environment_episodes import play, texts
from verl.agents.environments import (
    EnvironmentSession,
    Observation,
    SkyRLEnvironment,
    check_environment,
    environments,
    make_environment,
    open_environment,
)
from verl.agents.environments.base import UNREADABLE_ACTION, logged_info
from verl.utils.errors import ConfigError, MissingDependencyError, RolloutError
from verl.utils.imports import is_installed
from verl.utils.logging import say_once

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


# ---- checks before an episode --------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["gym", "skyrl", "own"])
def test_keywords_of_a_class_are_checked_before_an_episode(kind, tmp_path):
    first = "init" if kind == "skyrl" else "reset"
    file = tmp_path / "worlds.py"
    file.write_text(
        "class World:\n"
        f"    verl_adapter = {None if kind == 'own' else kind!r}\n"
        "    def __init__(self, size=3): ...\n"
        f"    def {first}(self): ...\n"
        "    def step(self, action): ...\n"
    )
    world = f"{file}:World"
    check_environment(world, {"size": 4})
    with pytest.raises(ConfigError, match=r"World' do not fit.*argument 'sise'"):
        check_environment(world, {"sise": 4})

    if kind != "own":
        check_environment(kind, {"env": world, "size": 4})
        with pytest.raises(ConfigError, match=r"World' do not fit.*argument 'sise'"):
            check_environment(kind, {"env": world, "sise": 4})


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
