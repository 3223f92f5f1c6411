"""Environments in the shape of SkyRL-gym's `BaseTextEnv`."""

from collections.abc import Callable
from typing import Any

from verl.agents.entries import class_or_maker, names_a_class
from verl.agents.environments.base import Adapter, Observation, environments, field_of
from verl.utils.errors import (
    ConfigError,
    MissingDependencyError,
    RolloutError,
    describe_error,
)
from verl.utils.imports import missing_package

_INSTALL = "pip install skyrl-gym"
_MISSING = object()


class SkyRLEnvironment(Adapter):
    """Adapts `init(prompt) -> (messages, info)` and `step(action) -> {"observations", "reward",
    "done", "metadata"}`. The result of `step` may be a mapping or an object with these attributes.

    Args:
        environment: an object with these methods; no import of SkyRL is needed.
    """

    def reset(self, prompt: Any = None, **row: Any) -> Observation:
        """Begin an episode with the row's prompt, given as `raw_prompt` or `prompt`.

        `init` returns the whole conversation. Where it begins with the prompt, only the messages
        after it are new; otherwise it replaces the prompt.
        """
        given = row.get("raw_prompt") or prompt or []
        messages = [dict(message) for message in given]
        opened, info = self.unwrapped.init([dict(message) for message in given])
        opening = list(opened)
        details = dict(info or {})
        if opening[: len(messages)] == messages:
            return Observation(opening[len(messages) :], info=details)
        return Observation(opening, info=details, replaces_prompt=True)

    def step(self, action: str) -> Observation:
        """Apply the model's text. Raises RolloutError for a result without the four fields."""
        result = self.unwrapped.step(action)
        reward = float(_required(result, "reward"))
        done = bool(_required(result, "done"))
        observations = list(_required(result, "observations") or [])
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
    """Import the class that `env` names, or make and close one environment of SkyRL-gym's id.

    The library imports an environment, with the packages that it needs, when it is made. Raises
    ConfigError for an unknown id and for keywords that do not fit it.
    """
    make = _maker(env)
    if names_a_class(env):
        return
    try:
        SkyRLEnvironment(make(**kwargs)).close()
    except ModuleNotFoundError as error:
        reason = missing_package(error) or f"{error}."
        raise MissingDependencyError(f"The environment '{env}' of SkyRL-gym: {reason}") from error
    except Exception as error:
        raise ConfigError(
            f"SkyRL-gym cannot make '{env}': {describe_error(error)}. Correct "
            "actor_rollout_ref.rollout.agent.environment.kwargs, or name a class of yours."
        ) from error


def _maker(env: str) -> Callable[..., Any]:
    """Return the class that `env` names, or the library's own `make` for its id."""
    return class_or_maker(env, "skyrl_gym", _INSTALL)


def _required(result: Any, name: str) -> Any:
    value = field_of(result, name, _MISSING)
    if value is _MISSING:
        raise RolloutError(
            f"A step in the shape of SkyRL-gym must return observations, reward, done and "
            f"metadata; '{name}' is missing in {str(result)[:80]!r}."
        )
    return value
