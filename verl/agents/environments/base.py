"""The protocol of an environment, and the registry of those that have a name."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from verl.agents.user_thread import flag_of, is_finite_number
from verl.utils.errors import (
    ConfigError,
    MissingDependencyError,
    RolloutError,
    VerlError,
    describe_error,
)
from verl.utils.imports import missing_package
from verl.utils.json_text import whole_characters, whole_number
from verl.utils.registry import Registry

# Marks an observation, in its `info`, that answers a turn without an action.
UNREADABLE_ACTION = "unreadable_action"
_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
_MOST_CHARACTERS = 1000  # of a text in `info`
# No part of a fraction.
_WHOLE_NUMBER = re.compile(r"(?<![\d.])[-+]?\d+(?!\d|\.\d)")


class ActionError(ValueError):
    """The model's text holds no action. An environment answers with the error's text."""


@dataclass
class Observation:
    """New messages of an environment, and the outcome of the action before them.

    Attributes:
        messages: {"role", "content"} to append to the conversation; at the end none is needed.
        reward: for the last action, of the role that acted.
        done: whether the episode has ended.
        info: further facts, as in gym. The finite numbers, truth values and texts of an episode's
            last observation go to the sample log, and the numbers into `environment/<name>/mean`.
        replaces_prompt: whether the opening messages are the whole conversation, in place of the
            row's prompt, which they otherwise follow. Read where a conversation begins.
        role: the role that acts next, and reads `messages`. "" in environments of one role.
        rewards: further rewards by role, for the last action of each, as in a game that one wins.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    replaces_prompt: bool = False
    role: str = ""
    rewards: dict[str, float] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """The world of one episode. An object serves one trajectory, and one call at a time.

    Methods may be plain functions as well; both kinds run in a thread of the episode. A class with
    an attribute `roles`, a tuple of names, has several agents: every observation names the `role`
    that acts next, and each role has a conversation of its own.

    A class with `async play(base_url, api_key, row)` in place of these methods calls the model
    itself, through the gateway, and returns the reward. One object plays all episodes.
    """

    async def reset(self, **kwargs: Any) -> Observation:
        """Begin an episode.

        Args:
            kwargs: the row's fields, among them those of `extra_info`; a method that names its
                parameters gets only these.

        Returns:
            The opening messages, which follow the row's prompt. There may be none.
        """
        ...

    async def step(self, action: str) -> Observation:
        """Apply the text that the model wrote in its turn."""
        ...

    async def close(self) -> None:
        """Free the episode's resources. Called once, also after an error."""
        ...


class Adapter:
    """Hold an environment of another library, whose `close` may be missing."""

    # Names of methods that the other library has under another name.
    renamed: ClassVar[Mapping[str, str]] = {}

    def __init__(self, environment: Any) -> None:
        self.unwrapped = environment

    def users_method(self, name: str) -> Callable[..., Any] | None:
        """Return the method behind one of this class, for messages; None where it is missing."""
        return getattr(self.unwrapped, self.renamed.get(name, name), None)

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        close = getattr(self.unwrapped, "close", None)
        if close is not None:
            close()


# Makers by name: f(**config) -> an environment for one episode.
environments: Registry[Callable[..., Any]] = Registry("environment")


def check_made(library: str, env: str, make: Callable[[], Adapter]) -> None:
    """Make and close one world of a library, which imports the packages that it needs then.

    Args:
        env: the library's id of the world.
        make: makes it.

    Raises:
        ConfigError: the id is unknown, the keywords do not fit, or no text stands for its actions.
        MissingDependencyError: a package that the world needs is not installed.
    """
    try:
        make().close()
    except ModuleNotFoundError as error:
        reason = missing_package(error) or f"{error}."
        raise MissingDependencyError(f"The environment '{env}' of {library}: {reason}") from error
    except VerlError as error:
        raise ConfigError(f"The environment '{env}': {error}") from error
    except Exception as error:
        raise ConfigError(
            f"{library} cannot make '{env}': {describe_error(error)}. Correct "
            "actor_rollout_ref.rollout.agent.environment.kwargs, or name a class of yours."
        ) from error


def name_of(environment: Any) -> str:
    """Return the name of an environment's class, without its adapters."""
    return type(getattr(environment, "unwrapped", environment)).__name__


def field_of(value: Any, name: str, default: Any = None) -> Any:
    """Return a field of a mapping, or an attribute of any other object."""
    if isinstance(value, Mapping):
        return value.get(name, default)
    return getattr(value, name, default)


def required_flag(value: Any, where: str, name: str) -> bool:
    """Return a truth value of an environment. Raises RolloutError for anything else."""
    flag = flag_of(value)
    if flag is None:
        raise RolloutError(f"{where} must return True or False as {name}, got {value!r}.")
    return flag


def user_message(text: str) -> dict[str, Any]:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def refused_action(text: str) -> Observation:
    """Return the answer to a turn that holds no action: the episode goes on, and it is counted."""
    return Observation([user_message(text)], info={UNREADABLE_ACTION: 1.0})


def logged_info(info: Mapping[Any, Any]) -> dict[str, float | str]:
    """Return the finite numbers, truth values as 0 and 1, and the texts of an `info`."""
    logged: dict[str, float | str] = {}
    for name, value in info.items():
        if isinstance(value, str):
            logged[str(name)] = whole_characters(value[:_MOST_CHARACTERS])
        elif isinstance(value, _NUMBERS) and is_finite_number(value):
            logged[str(name)] = float(value)
    logged.pop(UNREADABLE_ACTION, None)  # counted for all turns
    return logged


def last_whole_number(text: str) -> int | None:
    """Return the last whole number that a model wrote; None without one. "1.5" has none."""
    written = _WHOLE_NUMBER.findall(text)
    return whole_number(written[-1]) if written else None
