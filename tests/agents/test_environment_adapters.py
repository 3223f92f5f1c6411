"""Adapters of environments in the shapes of gym and SkyRL-gym."""

import re
from functools import partial

import numpy as np
import pytest

from tests.agents.environment_episodes import play, texts
from verl.agents.environments import (
    GymEnvironment,
    SkyRLEnvironment,
    check_environment,
    make_environment,
)
from verl.agents.environments.gym_spaces import action_reader, observation_text
from verl.utils.errors import ConfigError, RolloutError


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
