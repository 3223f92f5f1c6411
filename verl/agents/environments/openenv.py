"""Environments served by OpenEnv, through its client."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from verl.agents.entries import load_class
from verl.agents.environments.base import (
    Observation,
    environments,
    field_of,
    refused_action,
    required_flag,
    user_message,
)
from verl.utils.errors import RolloutError
from verl.utils.imports import require
from verl.utils.logging import say_once
from verl.utils.registry import refuse_unknown
from verl.utils.signatures import keywords_of, taken_by, takes_any_keyword

_INSTALL = "pip install openenv"
# OpenEnv's client raises a RuntimeError that holds the server's code in its text alone.
_REFUSED_BY_SERVER = "(code: VALIDATION_ERROR)"
_SERVER_IS_FULL = "(code: CAPACITY_REACHED)"


class OpenEnvEnvironment:
    """Adapts an OpenEnv client: `reset()` and `step(action)` that return `observation`, `reward`
    and `done`. The client may be asynchronous or a `.sync()` wrapper.

    OpenEnv defines actions and observations per environment. The model's text becomes one field of
    the action, and one field of the observation becomes the message. A field within another one is
    a path, such as "arguments.message" and "result.data" of a tool call.

    Args:
        client: a connected client, or one that connects in `async with`.
        observation_field: field with the text, in mappings or attributes; of several fields the
            first that an observation has. An observation of `reset` without any text needs none:
            the row's prompt is then the whole opening.
        action_field: field that takes the model's text.
        action_class: class of actions; None sends a mapping, as GenericEnvClient takes it.
        action_fields: further fields of each action.
        reset_fields: fields of the row that `reset` gets, after `seed` and `episode_id`.
    """

    def __init__(
        self,
        client: Any,
        *,
        observation_field: str | Sequence[str],
        action_field: str,
        action_class: type | None = None,
        action_fields: Mapping[str, Any] | None = None,
        reset_fields: str | Sequence[str] = (),
    ) -> None:
        self.unwrapped = client
        self.observation_fields = _names(observation_field)
        self.action_field = action_field
        self.action_class = action_class
        self.action_fields = dict(action_fields or {})
        self.reset_fields = ("seed", "episode_id", *_names(reset_fields))
        self._is_connected = False

    async def reset(self, **row: Any) -> Observation:
        """Connect and begin an episode. The row gives those of `reset_fields` that it has."""
        # Of the class: the `.sync()` wrapper passes other names on to its asynchronous client.
        is_asynchronous = hasattr(type(self.unwrapped), "__aenter__")
        if is_asynchronous and not self._is_connected:
            await self.unwrapped.__aenter__()
            self._is_connected = True

        known = {name: row[name] for name in self.reset_fields if row.get(name) is not None}
        reset = self.unwrapped.reset
        try:
            result = await _awaited(reset(**taken_by(reset, known)))
        except RuntimeError as error:
            if _SERVER_IS_FULL not in str(error):
                raise
            raise RolloutError(
                f"{error}. Raise max_concurrent_envs of the server's create_app, or set "
                "actor_rollout_ref.rollout.agent.max_episodes to the sessions that it has"
            ) from error

        has_texts = any(isinstance(value, str) for value in _fields(result.observation).values())
        return self._observation(result, may_lack_text=not has_texts)

    async def step(self, action: str) -> Observation:
        """Send the model's text as an action.

        A text that the action's type refuses, here or at the server, is answered to the model, and
        the environment takes no step.
        """
        path = self.action_field.split(".")
        fields = _with_field(self.action_fields, path, action)
        sent: Any = fields
        if self.action_class is not None:
            try:
                sent = self.action_class(**fields)
            except ValidationError as error:
                if not _is_about(path, error):
                    raise
                return self._refused(error.errors()[0]["msg"])

        try:
            result = await _awaited(self.unwrapped.step(sent))
        except RuntimeError as error:
            if _REFUSED_BY_SERVER not in str(error):
                raise
            return self._refused(f"it does not have the type of the action's '{self.action_field}'")
        return self._observation(result)

    async def close(self) -> None:
        """Close the connection, and a container that the client started."""
        await _awaited(self.unwrapped.close())

    def _refused(self, reason: str) -> Observation:
        say_once(
            f"The environment refused an action ({reason}), and the model reads so. Where it "
            f"refuses all of them, correct action_field={self.action_field} and action_fields."
        )
        return refused_action(f"The environment refused this answer: {reason}.")

    def _observation(self, result: Any, *, may_lack_text: bool = False) -> Observation:
        done = self._is_set(result, "done") or self._is_set(result, "truncated")
        found = None
        for path in self.observation_fields:
            found = _value_at(result.observation, path.split("."))
            if found is not None:
                break

        is_missing = found is None and (done or may_lack_text)
        if not isinstance(found, str) and not is_missing:
            within = result.observation if found is None else found
            raise RolloutError(
                f"observation_field '{', '.join(self.observation_fields)}' must be a text in the "
                f"observation, got {type(found).__name__}. Fields: {_shown(within)}."
            )
        messages = [user_message(found)] if found else []
        # A client of an environment's own class may keep it out of its type of observations.
        metadata = _value_at(result.observation, ["metadata"]) or field_of(result, "metadata")
        info = dict(metadata) if isinstance(metadata, Mapping) else {}
        reward = 0.0 if result.reward is None else result.reward
        return Observation(messages, reward, done, info)

    def _is_set(self, result: Any, name: str) -> bool:
        """Return a truth value of a result; False where the server sent none."""
        value = getattr(result, name, None)
        return value is not None and required_flag(value, type(self.unwrapped).__name__, name)


@environments.register("openenv")
def make_openenv(
    base_url: str,
    observation_field: str | Sequence[str],
    action_field: str,
    client_class: str | None = None,
    action_class: str | None = None,
    action_fields: Mapping[str, Any] | None = None,
    reset_fields: str | Sequence[str] = (),
    **kwargs: Any,
) -> OpenEnvEnvironment:
    """Make a client of a running OpenEnv server.

    Args:
        base_url: of the server, such as "http://localhost:8000".
        observation_field, action_field, action_fields, reset_fields: see `OpenEnvEnvironment`.
        client_class: "package.module.Class" of the environment's client; None: GenericEnvClient.
        action_class: "package.module.Class" of its actions; None: a mapping.
        kwargs: for the client.

    Raises:
        MissingDependencyError: OpenEnv is not installed.
    """
    return OpenEnvEnvironment(
        _client(client_class)(base_url=base_url, **kwargs),
        observation_field=observation_field,
        action_field=action_field,
        action_class=None if action_class is None else load_class(action_class),
        action_fields=action_fields,
        reset_fields=reset_fields,
    )


def check_openenv(
    client_class: str | None = None, action_class: str | None = None, **settings: Any
) -> None:
    """Import OpenEnv, and the classes of an environment with the packages that they need.

    Args:
        settings: the other keywords of `make_openenv`, with those for the client.

    Raises:
        ConfigError: a class cannot be imported, or the client does not take a keyword.
        MissingDependencyError: a package is not installed.
    """
    client = _client(client_class)
    if action_class is not None:
        load_class(action_class)

    our_own = keywords_of(make_openenv)
    given = [name for name in settings if name not in our_own]
    if given and not takes_any_keyword(client):
        place = f"agent.environment.kwargs, for OpenEnv's client {client.__name__}"
        refuse_unknown(place, given, [*keywords_of(client), *our_own])


def _client(client_class: str | None) -> Any:
    """Return the class of an environment's client; None: OpenEnv's own."""
    core = require("openenv.core", "The environment 'openenv'", _INSTALL)
    if client_class is not None:
        return load_class(client_class)
    return core.GenericEnvClient


def _with_field(fields: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy of `fields` with a value at a path; mappings on the way are copied or made."""
    first, *rest = path
    if not rest:
        return {**fields, first: value}
    inner = fields.get(first)
    return {**fields, first: _with_field(inner or {}, rest, value)}


def _is_about(path: Sequence[str], error: ValidationError) -> bool:
    """Return whether a class of actions refused only the model's text, which stands at `path`.

    Another field that it misses or does not know is a mistake of the configuration.
    """
    for cause in error.errors():
        place = [str(name) for name in cause["loc"][: len(path)]]
        if place != list(path[: len(place)]) or cause["type"] == "extra_forbidden":
            return False
    return True


def _value_at(observed: Any, path: Sequence[str]) -> Any:
    """Return the value at a path through mappings and attributes; None where it ends early."""
    for name in path:
        observed = field_of(observed, name)
    return observed


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _fields(observed: Any) -> Mapping[str, Any]:
    return observed if isinstance(observed, Mapping) else getattr(observed, "__dict__", {})


def _shown(observed: Any) -> str:
    """Return the fields that an observation has, for an error."""
    return ", ".join(sorted(_fields(observed))) or f"none, it is {str(observed)[:80]!r}"


async def _awaited(value: Any) -> Any:
    if inspect.isawaitable(value):
        return await value
    return value
