"""Environments by name: built-in ones, adapters, and users' classes."""

from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from typing import Any

from verl.agents.entries import (
    checked_roles,
    load_class,
    names_a_class,
    require_keywords,
    require_methods,
)

# These register themselves.
from verl.agents.environments import calculator as _calculator  # noqa: F401
from verl.agents.environments import number_guessing as _number_guessing  # noqa: F401
from verl.agents.environments.base import Adapter, environments
from verl.agents.environments.gym import GymEnvironment, check_gym
from verl.agents.environments.openenv import check_openenv
from verl.agents.environments.session import EnvironmentSession
from verl.agents.environments.skyrl import SkyRLEnvironment, check_skyrl
from verl.agents.environments.verifiers import verifiers_library
from verl.utils.errors import ConfigError

_METHODS = ("reset", "step")
_NAME = "actor_rollout_ref.rollout.agent.environment.name"
# Checks of adapters before their first episode, by the keywords of the environment.
_CHECKS: Mapping[str, Callable[..., Any]] = {
    "gym": check_gym,
    "openenv": check_openenv,
    "skyrl": check_skyrl,
    "verifiers": verifiers_library,
}


def open_environment(
    name: str, config: Mapping[str, Any], *, timeout_s: float
) -> EnvironmentSession:
    """Return a session, not yet begun. Its `reset` makes an environment of its own.

    Args:
        name: see `make_environment`.
        config: keywords of the class.
        timeout_s: deadline of a call in seconds.

    Raises:
        ConfigError: the name is unknown.
    """
    return EnvironmentSession(partial(find_environment(name), **config), timeout_s)


def make_environment(name: str, **config: Any) -> Any:
    """Make an environment for one episode.

    Args:
        name: a registered name, or "package.module.Class" or "file.py:Class" of a user's class in
            verl's, gym's or SkyRL-gym's shape.
        config: keywords of the class.

    Raises:
        ConfigError: no environment has this name, or the class lacks a method.
    """
    return find_environment(name)(**config)


def find_environment(name: str) -> Callable[..., Any]:
    """Return the maker of the environment that a name stands for; see `make_environment`."""
    if name.endswith(".py"):
        raise ConfigError(
            f"{_NAME} must be 'file.py:Class' for a class in a file, got '{name}'. Add ':' and the "
            "name of the class."
        )
    if not names_a_class(name):
        return environments.get(name)
    return adapted(load_class(name, _NAME), name)


def check_environment(name: str, config: Mapping[str, Any]) -> None:
    """Check what is known about an environment before an episode is played.

    Raises:
        ConfigError: the name or a class is unknown, or the keywords do not fit.
        MissingDependencyError: the library of an adapter is not installed.
    """
    require_keywords(find_environment(name), config, name)
    check = _CHECKS.get(name)
    if check is not None:
        check(**config)


def roles_of(name: str) -> tuple[str, ...]:
    """Return the roles that an environment declares as `roles`; () for one without.

    Raises ConfigError for an unknown name, and for roles that are not different texts.
    """
    roles = getattr(find_environment(name), "roles", ())
    return checked_roles(f"The environment '{name}'", roles)


def plays_itself(name: str) -> bool:
    """Return whether an environment has `play`: it calls the model itself, through the gateway."""
    return hasattr(find_environment(name), "play")


def adapted(cls: type, where: str) -> Callable[..., Any]:
    """Return a maker for a user's class: the class, or an adapter of the library it derives from.

    A class with `init` and no `reset` has SkyRL-gym's shape. A class derived from one of gym's or
    gymnasium's has gym's; one that is not, but returns gym's tuples, sets `verl_adapter = "gym"`.
    """
    bases = {base.__module__.split(".")[0] for base in cls.__mro__}
    kind = getattr(cls, "verl_adapter", None)
    if kind is None and hasattr(cls, "init") and not hasattr(cls, "reset"):
        kind = "skyrl"
    if kind is None and bases & {"gym", "gymnasium"}:
        kind = "gym"
    if kind not in (None, "gym", "skyrl"):
        raise ConfigError(f"{where}: verl_adapter must be 'gym' or 'skyrl', got {kind!r}.")

    if kind == "skyrl":
        require_methods(cls, ("init", "step"), where)
        return _adapting(SkyRLEnvironment, cls)
    if kind is None and hasattr(cls, "play"):
        return cls
    require_methods(cls, _METHODS, where)
    if kind == "gym":
        return _adapting(GymEnvironment, cls)
    return cls


def _adapting(adapter: Callable[[Any], Adapter], cls: type) -> Callable[..., Adapter]:
    """Return a maker of a user's class in an adapter, with the signature of the class."""

    def make(**config: Any) -> Adapter:
        return adapter(cls(**config))

    return update_wrapper(make, cls, updated=())
