"""Worlds that answer a model's turns with messages and rewards. Public names load on first use.

`make_environment` knows the built-in ones, adapters for other libraries, and a user's own class.
"""

from typing import TYPE_CHECKING

from verl.utils.lazy import lazy_names

if TYPE_CHECKING:
    from verl.agents.environments.base import ActionError, Environment, Observation, environments
    from verl.agents.environments.gym import GymEnvironment
    from verl.agents.environments.make import (
        check_environment,
        make_environment,
        open_environment,
        plays_itself,
        roles_of,
    )
    from verl.agents.environments.session import EnvironmentSession
    from verl.agents.environments.skyrl import SkyRLEnvironment

__all__ = [
    "ActionError",
    "Environment",
    "EnvironmentSession",
    "GymEnvironment",
    "Observation",
    "SkyRLEnvironment",
    "check_environment",
    "environments",
    "make_environment",
    "open_environment",
    "plays_itself",
    "roles_of",
]


__getattr__ = lazy_names(
    __name__,
    {
        "ActionError": "verl.agents.environments.base",
        "Environment": "verl.agents.environments.base",
        "EnvironmentSession": "verl.agents.environments.session",
        "GymEnvironment": "verl.agents.environments.gym",
        "Observation": "verl.agents.environments.base",
        "SkyRLEnvironment": "verl.agents.environments.skyrl",
        "check_environment": "verl.agents.environments.make",
        "environments": "verl.agents.environments.make",
        "make_environment": "verl.agents.environments.make",
        "open_environment": "verl.agents.environments.make",
        "plays_itself": "verl.agents.environments.make",
        "roles_of": "verl.agents.environments.make",
    },
)
