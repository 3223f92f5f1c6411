"""Environments in the shape of SkyRL-gym's `BaseTextEnv`."""

from collections.abc import Callable, Mapping
from typing import Any

from verl.agents.entries import class_or_maker
from verl.agents.environments.base import Adapter, Observation, environments
from verl.utils.errors import RolloutError

_INSTALL = "pip install skyrl-gym"


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
        reward = _field(result, "reward")
        done = bool(_field(result, "done"))
        observations = list(_field(result, "observations") or [])
        metadata = _field(result, "metadata", required=False) or {}
        return Observation(observations, float(reward), done, dict(metadata))


@environments.register("skyrl")
def make_skyrl(env: str, **kwargs: Any) -> SkyRLEnvironment:
    """Make an environment of SkyRL-gym.

    Args:
        env: "package.module.Class", "file.py:Class", or an id registered in skyrl_gym.
        kwargs: for the class.

    Raises:
        MissingDependencyError: `env` is an id and skyrl-gym is not installed.
    """
    return SkyRLEnvironment(skyrl_maker(env)(**kwargs))


def skyrl_maker(env: str, **_: Any) -> Callable[..., Any]:
    """Return the class that `env` names, or the library's own `make` for its id."""
    return class_or_maker(env, "skyrl_gym", _INSTALL)


def _field(result: Any, name: str, *, required: bool = True) -> Any:
    if isinstance(result, Mapping) and name in result:
        return result[name]
    if not isinstance(result, Mapping) and hasattr(result, name):
        return getattr(result, name)
    if not required:
        return None
    raise RolloutError(
        f"A step in the shape of SkyRL-gym must return observations, reward, done and metadata; "
        f"'{name}' is missing in {str(result)[:80]!r}."
    )
