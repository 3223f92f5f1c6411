"""Agent loops from a YAML file: `rollout.agent.agent_loop_config_path`."""

from pathlib import Path
from typing import Any

from verl.agents.entries import find_class, folder_of, load_class, read_yaml
from verl.agents.loops.base import agent_loops
from verl.agents.loops.user_base import AgentLoopBase
from verl.agents.loops.user_loop import add_user_loop
from verl.utils.errors import ConfigError

_KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"


def register_loops(path: str | Path) -> list[str]:
    """Register the loops that a YAML file lists. Return their names.

    The file is a list of `{name: ..., _target_: package.module.Class, ...}`; `_target_` may also be
    `file.py:Class`, and further keys are keywords of every object. Raises ConfigError naming file
    and entry.
    """
    entries = read_yaml(path, _KEY)
    if not isinstance(entries, list):
        raise ConfigError(
            f"{_KEY}={path} must be a list of {{name, _target_, ...}}, got "
            f"{type(entries).__name__}."
        )
    names: list[str] = []
    folder = folder_of(path)
    for number, entry in enumerate(entries):
        name = _register(f"{path}, entry {number}", entry, folder)
        if name in names:
            raise ConfigError(
                f"{path}, entry {number}: the name '{name}' is taken by entry {names.index(name)}. "
                "Give one of them another name."
            )
        names.append(name)
    return names


def _register(place: str, entry: Any, folder: Path) -> str:
    """Register the loop of an entry, of a file in `folder`. Return its name."""
    if not isinstance(entry, dict) or not {"name", "_target_"} <= entry.keys():
        raise ConfigError(f"{place}: expected the keys name and _target_, got {entry!r:.200}.")
    options = {str(key): value for key, value in entry.items()}
    name = str(options.pop("name"))
    try:
        target = load_class(find_class(str(options.pop("_target_")), folder))
    except ConfigError as error:
        raise ConfigError(f"{place}: _target_: {error}") from error

    if name in agent_loops:
        agent_loops.remove(name)  # a user's own replaces the built-in of that name
    if issubclass(target, AgentLoopBase):
        add_user_loop(name, target, **options)
        return name
    if hasattr(target, "play"):
        if options:
            raise ConfigError(
                f"{place}: keys other than name and _target_ are for classes with run, and "
                f"{target.__name__} has play, got {', '.join(options)}. Leave them out."
            )
        agent_loops.register(name)(target)
        return name
    raise ConfigError(
        f"{place}: _target_ must be a class with run (verl.agents.AgentLoopBase) or with play "
        f"(verl.agents.AgentLoop), got {target!r}."
    )
