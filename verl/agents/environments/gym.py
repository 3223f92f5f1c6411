"""Environments with gym's methods that observe texts and act on texts."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from verl.agents.entries import class_or_maker, names_a_class, require_keywords
from verl.agents.environments.base import (
    ActionError,
    Adapter,
    Observation,
    check_made,
    environments,
    name_of,
    refused_action,
    required_flag,
    user_message,
)
from verl.agents.environments.gym_spaces import action_reader, observation_text
from verl.utils.errors import RolloutError
from verl.utils.signatures import taken_by

_INSTALL = "pip install gymnasium"


class GymEnvironment(Adapter):
    """Adapts `reset() -> (observation, info)` and `step(action) -> (observation, reward,
    terminated, truncated, info)`.

    The older forms work as well: `reset` that returns the observation alone, and `step` that
    returns (observation, reward, done, info). Methods are plain functions, as gym defines them.

    Args:
        environment: an object with these methods.
        as_text: turns an observation that is no text into one.
        as_action: turns the model's text into an action. It raises ActionError for a text without
            one: the model then reads the error's text, and the environment takes no step.
    """

    def __init__(
        self,
        environment: Any,
        *,
        as_text: Callable[[Any], str] | None = None,
        as_action: Callable[[str], Any] | None = None,
    ) -> None:
        super().__init__(environment)
        self._as_text = as_text
        self._as_action = as_action

    def reset(self, **row: Any) -> Observation:
        """Begin an episode. `seed` and the parameters that `reset` names come from the row; a
        parameter `options` gets all its fields."""
        reset = self.unwrapped.reset
        keywords = taken_by(reset, {"options": row, **row})
        result = reset(**keywords)
        if isinstance(result, tuple) and len(result) == 2:
            observation, info = result
        else:
            observation = result
            info = {}
        return Observation(self._messages(observation), info=_info(info))

    def step(self, action: str) -> Observation:
        """Apply the model's text. Raises RolloutError for a result of another shape."""
        try:
            given = action if self._as_action is None else self._as_action(action)
        except ActionError as error:
            return refused_action(str(error))

        result = self.unwrapped.step(given)
        size = len(result) if isinstance(result, tuple) else 0
        if size == 5:
            observation, reward, terminated, truncated, info = result
        elif size == 4:
            observation, reward, terminated, info = result
            truncated = False
        else:
            raise RolloutError(
                f"{name_of(self)}.step must return (observation, reward, "
                f"terminated, truncated, info) or (observation, reward, done, info), got "
                f"{str(result)[:80]!r}."
            )

        where = f"{name_of(self)}.step"
        is_over = required_flag(terminated, where, "terminated (done)")
        is_cut = required_flag(truncated, where, "truncated")
        done = is_over or is_cut

        details = {**_info(info), "truncated": float(is_cut)}
        messages = self._messages(observation, may_be_empty=done)
        return Observation(messages, reward, done, details)

    def _messages(self, observation: Any, *, may_be_empty: bool = False) -> list[dict[str, Any]]:
        is_empty = observation is None or (isinstance(observation, str) and not observation)
        if may_be_empty and is_empty:
            return []
        if isinstance(observation, list) and all(isinstance(item, dict) for item in observation):
            return observation
        text = observation if self._as_text is None else self._as_text(observation)
        if isinstance(text, str):
            return [user_message(text)]
        raise RolloutError(
            f"{name_of(self)} must observe a text or a list of messages, got "
            f"{type(text).__name__}. Derive GymEnvironment with as_text=..., which turns it into "
            "a text."
        )


@environments.register("gym")
def make_gym(env: str, **kwargs: Any) -> GymEnvironment:
    """Make a gym-style environment.

    A class gets and returns texts itself. A world of gymnasium's registry is read and shown by
    `gym_spaces`: numbers become texts, and the model chooses an action by its number.

    Args:
        env: "package.module.Class", "file.py:Class", or an id that gymnasium knows, such as
            "FrozenLake-v1".
        kwargs: for the class.

    Raises:
        MissingDependencyError: `env` is an id and gymnasium is not installed.
    """
    world = _maker(env)(**kwargs)
    if names_a_class(env):
        return GymEnvironment(world)
    return GymEnvironment(
        world, as_text=partial(observation_text, world), as_action=action_reader(world)
    )


def check_gym(env: str, **kwargs: Any) -> None:
    """Check the keywords of the class that `env` names, or make one world of gymnasium's id.

    Raises ConfigError and MissingDependencyError, see `check_made`.
    """
    make = _maker(env)
    if names_a_class(env):
        require_keywords(make, kwargs, env)
    else:
        check_made("gymnasium", env, partial(make_gym, env, **kwargs))


def _maker(env: str) -> Callable[..., Any]:
    """Return the class that `env` names, or the library's own `make` for its id."""
    return class_or_maker(env, "gymnasium", _INSTALL)


def _info(info: Any) -> dict[str, Any]:
    return dict(info) if isinstance(info, Mapping) else {}
