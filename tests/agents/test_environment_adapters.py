"""Adapters of environments of other libraries: their mistakes are named by the user's class."""

import re

import pytest

from tests.agents.test_environments import play
from verl.agents.environments import GymEnvironment, SkyRLEnvironment
from verl.utils.errors import RolloutError


@pytest.mark.parametrize(
    ("result", "fact"),
    [
        (("seen", 1.0, "no", {}), "True or False as terminated .done., got 'no'"),
        (("seen", True, 1.0, False, {}), "True or False as terminated .done., got 1.0"),
        (("seen", 1.0, True, None, {}), "True or False as truncated, got None"),
        (("seen", None, True, {}), "a finite reward, got None"),
        (("seen", "1", True, {}), "a finite reward, got '1'"),
    ],
)
def test_gyms_rewards_and_flags_are_checked(result, fact):
    class Odd:
        def reset(self):
            return "ready"

        def step(self, action):
            return result

    assert_refused(GymEnvironment(Odd()), f"Odd.step must return {fact}")


@pytest.mark.parametrize(
    ("opened", "result", "fact"),
    [
        (None, {}, r"Odd.init must return \(messages, info\), got 'None'"),
        (("hello", {}), {}, "Odd.init must return a list of messages .*'hello'"),
        (([], {}), {"observations": "hello"}, "Odd.step must return a list of messages .*'hello'"),
        (([], {}), {"done": "False"}, "Odd.step must return True or False as done, got 'False'"),
        (([], {}), {"reward": None}, "Odd.step must return a finite reward, got None"),
    ],
)
def test_skyrls_messages_rewards_and_flags_are_checked(opened, result, fact):
    class Odd:
        def init(self, prompt):
            return opened

        def step(self, action):
            return {"observations": [], "reward": 1.0, "done": True, "metadata": {}, **result}

    assert_refused(SkyRLEnvironment(Odd()), fact)


def assert_refused(world, fact):
    with pytest.raises(RolloutError, match=f"^{fact}"):
        played(world)


def played(world):
    """Play an episode, in which a failed call is an error."""
    session, _ = play(world, ["on"], prompt=[])
    if session.failure is not None:
        raise RolloutError(session.failure.error)


@pytest.mark.parametrize(
    ("adapter", "method", "name"),
    [(GymEnvironment, "step", "step"), (SkyRLEnvironment, "reset", "init")],
)
def test_an_error_behind_an_adapter_names_the_users_line(adapter, method, name):
    class Broken:
        def reset(self):
            return "ready"

        def init(self, prompt):
            return {}["start"]

        def step(self, action):
            return {}["go"]

    session, _ = play(adapter(Broken()), ["on"] if method == "step" else [], prompt=[])
    assert session.failure is not None
    error = session.failure.error
    assert re.match(
        rf".*Broken.{name} raised KeyError \(.*test_environment_adapters.py:\d+\)", error
    )
