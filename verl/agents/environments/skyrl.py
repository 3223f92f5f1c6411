"""Environments in the shape of SkyRL-gym's `BaseTextEnv`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from verl.agents.entries import class_or_maker, names_a_class, require_keywords
from verl.agents.environments.base import (
    Adapter,
    Observation,
    check_made,
    environments,
    field_of,
    name_of,
    required_flag,
)
from verl.utils.errors import RolloutError

_INSTALL = "pip install skyrl-gym"
_MISSING = object()


class SkyRLEnvironment(Adapter):
    """Adapts `init(prompt) -> (messages, info)` and `step(action) -> {"observations", "reward",
    "done", "metadata"}`. The result of `step` may be a mapping or an object with these attributes.

    Args:
        environment: an object with these methods; no import of SkyRL is needed.
    """

    renamed: ClassVar[Mapping[str, str]] = {"reset": "init"}

    def reset(self, prompt: Any = None, **row: Any) -> Observation:
        """Begin an episode with the row's prompt, given as `raw_prompt` or `prompt`.

        `init` returns the whole conversation. Where it begins with the prompt, only the messages
        after it are new; otherwise it replaces the prompt.
        """
        given = row.get("raw_prompt") or prompt or []
        messages = [dict(message) for message in given]
        opened = self.unwrapped.init([dict(message) for message in given])
        if not isinstance(opened, tuple) or len(opened) != 2:
            raise RolloutError(
                f"{name_of(self)}.init must return (messages, info), got {str(opened)[:80]!r}."
            )
        opening, info = opened
        opening = _messages(opening, f"{name_of(self)}.init")
        details = dict(info or {})
        if opening[: len(messages)] == messages:
            return Observation(opening[len(messages) :], info=details)
        return Observation(opening, info=details, replaces_prompt=True)

    def step(self, action: str) -> Observation:
        """Apply the model's text. Raises RolloutError for a result without the four fields."""
        result = self.unwrapped.step(action)
        where = f"{name_of(self)}.step"
        reward = _required(result, "reward")
        done = required_flag(_required(result, "done"), where, "done")
        observations = _messages(_required(result, "observations"), where)
        metadata = field_of(result, "metadata") or {}
        return Observation(observations, reward, done, dict(metadata))


@environments.register("skyrl")
def make_skyrl(env: str, **kwargs: Any) -> SkyRLEnvironment:
    """Make an environment of SkyRL-gym.

    Args:
        env: "package.module.Class", "file.py:Class", or an id registered in skyrl_gym.
        kwargs: for the class.

    Raises:
        MissingDependencyError: `env` is an id and skyrl-gym is not installed.
    """
    return SkyRLEnvironment(_maker(env)(**kwargs))


def check_skyrl(env: str, **kwargs: Any) -> None:
    """Check the keywords of the class that `env` names, or make one world of SkyRL-gym's id.

    Raises ConfigError and MissingDependencyError, see `check_made`.
    """
    make = _maker(env)
    if names_a_class(env):
        require_keywords(make, kwargs, env)
    else:
        check_made("SkyRL-gym", env, partial(make_skyrl, env, **kwargs))


def _maker(env: str) -> Callable[..., Any]:
    """Return the class that `env` names, or the library's own `make` for its id."""
    return class_or_maker(env, "skyrl_gym", _INSTALL)


def _messages(given: Any, where: str) -> list[Any]:
    """Return the messages of a result, which may be None where there are none."""
    if given is None:
        return []
    if not isinstance(given, list | tuple):
        raise RolloutError(
            f"{where} must return a list of messages such as {{'role': 'user', 'content': 'Hi'}}, "
            f"got {str(given)[:80]!r}."
        )
    return list(given)


def _required(result: Any, name: str) -> Any:
    value = field_of(result, name, _MISSING)
    if value is _MISSING:
        raise RolloutError(
            f"A step in the shape of SkyRL-gym must return observations, reward, done and "
            f"metadata; '{name}' is missing in {str(result)[:80]!r}."
        )
    return value
