"""Checks of the data against the configured tools, interactions and loops, before models load."""

from collections.abc import Callable, Iterator
from typing import Any

from verl.agents.interactions import InteractionSet
from verl.agents.loops import agent_loops
from verl.agents.tools import ToolSet
from verl.config.rollout import RolloutConfig
from verl.utils.errors import ConfigError, DataError, VerlError
from verl.utils.registry import nearest_names

# Gives (file and row, value) of every row of a column.
Column = Callable[[str], Iterator[tuple[str, Any]]]

_ANSWERED = "tool_agent"
_WITHOUT_ANSWERS = ("single_turn_agent",)
_SECTION = "actor_rollout_ref.rollout"


def check_rows(
    config: RolloutConfig,
    tools: ToolSet | None,
    interactions: InteractionSet | None,
    column: Column,
) -> None:
    """Check that every row can be played, and that everything configured is reached by some row.

    Raises DataError naming file and row for an unknown loop, tool or interaction. Raises
    ConfigError for tools, interactions or an environment that no row reaches: the run would train
    on single turns without a word.
    """
    loops = _loops_of_rows(config, column)
    names = [name for _, name in loops]
    if (tools is not None or interactions is not None) and set(names) <= set(_WITHOUT_ANSWERS):
        raise ConfigError(
            f"Tools or interactions are configured, but every row is played by {sorted(set(names))}, "
            f"which never calls them. Set the column agent_name to {_ANSWERED}, or leave it out."
        )
    if config.agent.environment.name is not None and "environment_agent" not in names:
        raise ConfigError(
            f"{_SECTION}.agent.environment.name={config.agent.environment.name} is configured, but "
            "no row has agent_name=environment_agent. Leave the column out, or set it so."
        )

    known = None if tools is None else list(tools.names)
    reached = False
    for place, kwargs in _options(column, "tools_kwargs"):
        named = [name for name, value in (kwargs or {}).items() if value is not None]
        unknown = sorted(set(named) - set(named if known is None else known))
        if unknown:
            raise DataError(
                f"{place}: tools_kwargs names the tool '{unknown[0]}', which no configured file "
                f"has. Nearest known: {nearest_names(unknown[0], known or [])}."
            )

    if interactions is None:
        return
    for place, kwargs in _options(column, "interaction_kwargs"):
        if not kwargs:
            continue
        reached = True
        try:
            interactions.session(kwargs)
        except VerlError as error:
            raise DataError(f"{place}: {error}") from error
    if not reached:
        raise ConfigError(
            f"{_SECTION}.multi_turn.interaction_config_path is set, but no row has "
            "interaction_kwargs in extra_info, so no interaction would ever answer. Add them "
            "({name: ..., ...}), or leave the path out."
        )


def _loops_of_rows(config: RolloutConfig, column: Column) -> list[tuple[str, str]]:
    """Return (file and row, name of the loop) of every row."""
    loops = []
    for place, name in column("agent_name"):
        chosen = str(name or config.agent_loop)
        if chosen not in agent_loops:
            raise DataError(
                f"{place}: agent_name is '{chosen}', which is no registered agent loop. Nearest "
                f"known: {nearest_names(chosen, list(agent_loops))}. "
                f"{_SECTION}.agent.agent_loop_config_path or model.external_lib registers yours."
            )
        loops.append((place, chosen))
    return loops


def _options(column: Column, name: str) -> Iterator[tuple[str, Any]]:
    """Give an option of every row: its own column, or else its entry in extra_info."""
    for (place, value), (_, extra) in zip(column(name), column("extra_info")):
        if value is None and isinstance(extra, dict):
            value = extra.get(name)
        yield place, value
