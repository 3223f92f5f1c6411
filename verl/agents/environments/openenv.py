"""Environments served by OpenEnv, through its client."""

import inspect
from collections.abc import Mapping
from typing import Any

from verl.agents.entries import load_class
from verl.agents.environments.base import Observation, environments, user_message
from verl.utils.errors import RolloutError
from verl.utils.imports import require
from verl.utils.signatures import taken_by

_INSTALL = "pip install openenv-core"


class OpenEnvEnvironment:
    """Adapts an OpenEnv client: `reset()` and `step(action)` that return `observation`, `reward`
    and `done`. The client may be asynchronous or a `.sync()` wrapper.

    OpenEnv defines actions and observations per environment. The model's text becomes one field of
    the action, and one field of the observation becomes the message.

    Args:
        client: a connected client, or one that connects in `async with`.
        observation_field: field with the text, in a mapping or an attribute.
        action_field: field that takes the model's text.
        action_class: class of actions; None sends a mapping, as GenericEnvClient takes it.
        action_fields: further fields of each action.
    """

    def __init__(
        self,
        client: Any,
        *,
        observation_field: str,
        action_field: str,
        action_class: type | None = None,
        action_fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.unwrapped = client
        self.observation_field = observation_field
        self.action_field = action_field
        self.action_class = action_class
        self.action_fields = dict(action_fields or {})
        self._is_connected = False

    async def reset(self, **row: Any) -> Observation:
        """Connect and begin an episode. `seed` and `episode_id` come from the row, where given."""
        connect = getattr(self.unwrapped, "__aenter__", None)
        if connect is not None and not self._is_connected:
            await connect()
            self._is_connected = True

        known = {name: row[name] for name in ("seed", "episode_id") if row.get(name) is not None}
        reset = self.unwrapped.reset
        return self._observation(await _awaited(reset(**taken_by(reset, known))))

    async def step(self, action: str) -> Observation:
        """Send the model's text as an action."""
        fields = {**self.action_fields, self.action_field: action}
        sent: Any = fields
        if self.action_class is not None:
            sent = self.action_class(**fields)
        return self._observation(await _awaited(self.unwrapped.step(sent)))

    async def close(self) -> None:
        """Close the connection, and a container that the client started."""
        await _awaited(self.unwrapped.close())

    def _observation(self, result: Any) -> Observation:
        seen = result.observation
        done = bool(getattr(result, "done", False) or getattr(result, "truncated", False))
        if isinstance(seen, Mapping):
            fields = seen
            found = seen.get(self.observation_field)
        else:
            fields = getattr(seen, "__dict__", {})
            found = getattr(seen, self.observation_field, None)

        if not isinstance(found, str) and not (found is None and done):
            raise RolloutError(
                f"observation_field '{self.observation_field}' must be a text in the observation, "
                f"got {type(found).__name__}. Fields: {', '.join(sorted(fields)) or 'none'}."
            )
        messages = [user_message(found)] if found else []
        return Observation(messages, float(result.reward or 0.0), done)


@environments.register("openenv")
def make_openenv(
    base_url: str,
    observation_field: str,
    action_field: str,
    client_class: str | None = None,
    action_class: str | None = None,
    action_fields: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> OpenEnvEnvironment:
    """Make a client of a running OpenEnv server.

    Args:
        base_url: of the server, such as "http://localhost:8000".
        observation_field, action_field, action_fields: see `OpenEnvEnvironment`.
        client_class: "package.module.Class" of the environment's client; None: GenericEnvClient.
        action_class: "package.module.Class" of its actions; None: a mapping.
        kwargs: for the client.

    Raises:
        MissingDependencyError: OpenEnv is not installed.
    """
    return OpenEnvEnvironment(
        openenv_client(client_class)(base_url=base_url, **kwargs),
        observation_field=observation_field,
        action_field=action_field,
        action_class=None if action_class is None else load_class(action_class),
        action_fields=action_fields,
    )


def openenv_client(client_class: str | None = None, **_: Any) -> Any:
    """Return the class of an environment's client; None: OpenEnv's own."""
    core = require("openenv.core", "The environment 'openenv'", _INSTALL)
    if client_class is not None:
        return load_class(client_class)
    return core.GenericEnvClient


async def _awaited(value: Any) -> Any:
    if inspect.isawaitable(value):
        return await value
    return value
