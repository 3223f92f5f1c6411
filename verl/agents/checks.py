"""Checks of the data against the configured tools, interactions and loops, before models load."""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl.agents.environments import check_environment, roles_of
from verl.agents.gateway.agents import load_agent
from verl.agents.interactions import InteractionSet
from verl.agents.loops import AgentContext, agent_loops
from verl.agents.loops.gateway import GATEWAY_AGENT
from verl.agents.loops.user_loop import UserLoopMaker
from verl.agents.policies import check_roles
from verl.agents.row_options import offered_tools, option_of, present
from verl.agents.tools import ToolSet
from verl.config.rollout import RolloutConfig
from verl.data.chat import as_messages
from verl.data.picture_parts import with_placeholders
from verl.utils.errors import ConfigError, DataError, VerlError
from verl.utils.logging import logger, say_once
from verl.utils.registry import misspelled, nearest_names

# Gives (file and row, value) of every row of a column.
Column = Callable[[str], Iterator[tuple[str, Any]]]

_ANSWERED = "tool_agent"
_ENVIRONMENT = "environment_agent"
_WITHOUT_TOOLS = ("single_turn_agent", _ENVIRONMENT, GATEWAY_AGENT)
LOOPS_WITH_PICTURES = ("single_turn_agent", _ANSWERED)
_BUILT_IN = (*_WITHOUT_TOOLS, _ANSWERED)
_SECTION = "actor_rollout_ref.rollout"
# Keywords in a row's tools_kwargs, by the method of the tool that gets them.
_SECTIONS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
# Options of a row: columns of their own, or entries of extra_info.
_OPTIONS = ("tools_kwargs", "need_tools_kwargs", "tool_selection", "interaction_kwargs")
# Prompts that are rendered with their tools before the start, those with the most characters.
_NUM_RENDERED = 2000


@dataclass(frozen=True, kw_only=True)
class _Row:
    """How one row is played: its loop, and the options in the order of `_OPTIONS`.

    `place` is its file and row, for messages.
    """

    place: str
    loop: str
    tools_kwargs: Any
    need_tools_kwargs: Any
    tool_selection: Any
    interaction_kwargs: Any

    @property
    def offered(self) -> list[str] | None:
        """Names of the tools that the row offers; None: all."""
        return offered_tools(self.tool_selection, self.tools_kwargs)


def check_rows(
    config: RolloutConfig,
    tools: ToolSet | None,
    interactions: InteractionSet | None,
    column: Column,
) -> None:
    """Check that every row can be played, and that everything configured is reached by some row.

    Raises DataError naming file and row for an unknown loop, tool or interaction, or a loop that
    needs what is not configured. Raises ConfigError for tools, interactions, an environment, a
    gateway or a loop of the user's that no row reaches: the run would train on single turns without
    a word; also for a class of a loop that cannot be made. Raises MissingDependencyError where the
    library of an environment is not installed.

    Args:
        column: of the training and the validation set together.
    """
    names = {name for _, name in _loops_of_rows(config, column)}
    if (tools is not None or interactions is not None) and names <= set(_WITHOUT_TOOLS):
        raise ConfigError(
            f"Tools or interactions are configured, but every row is played by {sorted(names)}, "
            f"which never calls them. Set the column agent_name to {_ANSWERED}, or leave it out."
        )
    for setting, value, loop in _answering(config):
        if value is not None and loop not in names:
            raise ConfigError(
                f"{_SECTION}.{setting}={value} is configured, but no row has agent_name={loop}: "
                f"all are played by {', '.join(sorted(names))}. Leave the column of the data and "
                "agent.default_agent_loop out, or set them so."
            )

    default = config.agent.default_agent_loop
    # verl's own configurations write a built-in loop as the default, whether rows need it or not.
    if default is not None and default not in names and default not in _BUILT_IN:
        raise ConfigError(
            f"{_SECTION}.agent.default_agent_loop={default} is for rows without agent_name, but "
            f"all rows have one: {', '.join(sorted(names))}. Take the column agent_name out of the "
            f"data, write {default} into it, or unset the key."
        )

    for name in sorted(names):
        maker = agent_loops.get(name)
        if isinstance(maker, UserLoopMaker):
            maker.check()
    options = _OptionChecks(tools, interactions)
    for row in _rows(config, column):
        options.check(row)
    options.end()
    _check_policies(config, names)
    environment = config.agent.environment
    if environment.name is not None:
        check_environment(environment.name, environment.kwargs)
    gateway = config.agent.gateway
    if gateway.path is not None or gateway.command is not None:
        load_agent(gateway.path, gateway.name, gateway.command)


def play_single_rows(config: RolloutConfig, column: Column) -> bool:
    """Return whether all episodes of the data are certain to be one row of a batch each."""
    loops = {name for _, name in _loops_of_rows(config, column)}
    if config.multi_turn.use_inference_chat_template:
        return loops <= {"single_turn_agent"}
    return loops <= {"single_turn_agent", _ANSWERED}


def check_pictures(config: RolloutConfig, column: Column, have_pictures: Iterable[bool]) -> None:
    """Check that prompts with pictures are played where they can be.

    Raises DataError naming file and row.

    Args:
        config: of the rollout.
        column: of the rows.
        have_pictures: whether each row has any.
    """
    for (place, loop), has_any in zip(_loops_of_rows(config, column), have_pictures):
        if has_any and loop not in LOOPS_WITH_PICTURES:
            raise DataError(
                f"{place}: the prompt has pictures, which the agent loop '{loop}' cannot play. Leave "
                f"the row out, or let one of {', '.join(LOOPS_WITH_PICTURES)} play it."
            )


def check_prompts(context: AgentContext, column: Column, prompt_key: str) -> None:
    """Check that the longest prompts fit their column with the tools that they offer.

    The length check of the data counts them without tools. Raises DataError naming file and row.
    """
    for place, length in prompts_too_long(context, column, prompt_key):
        raise DataError(
            f"{place}: the prompt has {length} tokens with the tools that it offers, "
            f"data.max_prompt_length allows {context.config.prompt_length}. Raise it, offer the "
            "row fewer tools (extra_info.tools_kwargs), or set data.filter_overlong_prompts=true "
            "(drop such rows)."
        )


def prompts_too_long(
    context: AgentContext, column: Column, prompt_key: str
) -> Iterator[tuple[str, int]]:
    """Give (file and row, tokens) of prompts that do not fit with the tools that they offer.

    Rows are taken by their characters, until 2,000 have fit. A shorter row that is too long all the
    same fails when it is played, and so does one that is too long with its pictures alone.
    """
    tools = context.tools
    if tools is None:
        return
    sized = []
    characters: dict[str, int] = {}
    for row, (place, messages) in zip(_rows(context.config, column), column(prompt_key)):
        if row.loop != _ANSWERED:
            continue
        offered = row.offered
        key = str(offered)
        if key not in characters:
            characters[key] = len(json.dumps(tools.schemas(offered)))
        sized.append((len(str(messages)) + characters[key], place, messages, offered))

    sized.sort(key=lambda entry: entry[0], reverse=True)
    fitting = 0
    for _, place, messages, offered in sized:
        # A picture counts as its placeholder here: its size is known when it is read.
        read = as_messages if context.pictures is None else with_placeholders
        prompt_ids = context.boundary.prompt(read(messages), tools.schemas(offered))
        if len(prompt_ids) > context.config.prompt_length:
            yield place, len(prompt_ids)
            continue
        fitting += 1
        if fitting == _NUM_RENDERED:
            return


def _answering(config: RolloutConfig) -> Iterator[tuple[str, str | None, str]]:
    """Give (setting, value, loop) of everything that a loop of its own plays."""
    agent = config.agent
    yield "agent.environment.name", agent.environment.name, _ENVIRONMENT
    yield "agent.gateway.path", agent.gateway.path, GATEWAY_AGENT
    yield "agent.gateway.command", agent.gateway.command, GATEWAY_AGENT


class _OptionChecks:
    """Checks the options of all rows, and that they reach the configured tools and users.

    Reading the options of a large file takes seconds, so all checks share one pass.
    """

    def __init__(self, tools: ToolSet | None, interactions: InteractionSet | None) -> None:
        self._tools = tools
        self._interactions = interactions
        self._known = [] if tools is None else list(tools.names)
        self._unused = set(self._known)
        self._is_user_reached = False
        self._warned: set[str] = set()  # messages, each of which names the first row alone

    def check(self, row: _Row) -> None:
        """Check one row. Raises DataError naming file and row."""
        self._check_shapes(row)
        if self._tools is None:
            self._warn_of_missing_tools(row)
        else:
            self._check_tools(row)
        if row.interaction_kwargs:
            self._check_interaction(row)

    def end(self) -> None:
        """Check that the rows reach all tools, and the interactions. Raises ConfigError."""
        if self._unused:
            logger.warning(
                "The tools %s are configured, but every row names others in tools_kwargs, so no "
                "model is offered them. Name them in the rows, or leave them out.",
                ", ".join(sorted(self._unused)),
            )
        if self._interactions is not None and not self._is_user_reached:
            raise ConfigError(
                f"{_SECTION}.multi_turn.interaction_config_path is set, but no row has "
                "interaction_kwargs in extra_info, so no interaction would ever answer. Add them "
                "({name: ..., ...}), or leave the path out."
            )

    def _warn(self, message: str, *values: str) -> None:
        """Log a warning for the first row that it is about."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *values)

    def _check_shapes(self, row: _Row) -> None:
        """Check that a row's options have the shape that agents read."""
        place = row.place
        kwargs = row.tools_kwargs
        if isinstance(row.tool_selection, str):
            raise DataError(
                f"{place}: tool_selection must be a list of tools, such as "
                f"['{row.tool_selection}'], got {row.tool_selection!r}."
            )
        _require_mapping(f"{place}: interaction_kwargs", row.interaction_kwargs, "{name: ..., ...}")
        _require_mapping(f"{place}: tools_kwargs", kwargs, "{tool: {create_kwargs: {...}, ...}}")
        if row.loop != _ANSWERED:  # a loop of the user's may read other keys
            return

        if row.need_tools_kwargs and not present(kwargs):
            self._warn("%s: need_tools_kwargs is set, but the row has no tools_kwargs.", place)
        for tool, sections in present(kwargs).items():
            where = f"tools_kwargs of the tool '{tool}'"
            expected = "{create_kwargs: {...}, execute_kwargs: {...}, ...}"
            _require_mapping(f"{place}: {where}", sections, expected)
            _check_sections(place, where, sections)

    def _warn_of_missing_tools(self, row: _Row) -> None:
        named = list(present(row.tools_kwargs))
        if named and not (self._interactions is not None and row.interaction_kwargs):
            self._warn(
                "%s: tools_kwargs names the tool '%s', but no tools are configured, so the row is "
                f"played without. Set {_SECTION}.multi_turn.tool_config_path.",
                row.place,
                named[0],
            )

    def _check_tools(self, row: _Row) -> None:
        """Check the names of tools in a row."""
        offered = row.offered
        unknown = sorted({*present(row.tools_kwargs), *(offered or ())} - set(self._known))
        if unknown:
            raise DataError(
                f"{row.place}: tools_kwargs names the tool '{unknown[0]}', which no configured "
                f"file has. Nearest known: {nearest_names(unknown[0], self._known)}. Add the tool "
                "to the file, or correct the row."
            )
        if row.loop not in _WITHOUT_TOOLS:
            self._unused -= set(self._known if offered is None else offered)

    def _check_interaction(self, row: _Row) -> None:
        """Check the interaction that a row asks for."""
        self._is_user_reached = True
        if self._interactions is not None:
            try:
                self._interactions.session(row.interaction_kwargs)
            except VerlError as error:
                raise DataError(f"{row.place}: {error}") from error
            return

        # Rows made for either, as verl's of GSM8K are, have chosen where the run has tools.
        if self._tools is None or not present(row.tools_kwargs):
            self._warn(
                "%s: the row has interaction_kwargs, but no interactions are configured, so no "
                f"user answers. Set {_SECTION}.multi_turn.interaction_config_path.",
                row.place,
            )


def _check_sections(place: str, where: str, sections: Mapping[str, Any]) -> None:
    """Check the keywords that one tool gets, by the method that gets them."""
    for name, keywords in present(sections).items():
        if name in _SECTIONS:
            _require_mapping(f"{place}: {where}, {name}", keywords, "{keyword: value}")
            continue
        known = ", ".join(_SECTIONS)
        meant = misspelled(name, _SECTIONS)
        if meant is not None:
            raise DataError(f"{place}: {where} has '{name}'. Did you mean {meant}? Known: {known}.")
        say_once(
            f"{where} has '{name}', which no method of the tool gets as a keyword. Known: {known}.",
            logging.WARNING,
        )


def _require_mapping(where: str, value: Any, expected: str) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise DataError(f"{where} must be {expected}, got {type(value).__name__}: {value!r:.80}.")


def _check_policies(config: RolloutConfig, names: Collection[str]) -> None:
    """Check that every role of the loops has a policy, and that every policy plays a role."""
    agent = config.agent
    known: set[str] = set()
    for name in sorted(names):
        roles = _roles_of_loop(config, name)
        if roles is None:
            known |= set(agent.policies)  # its code may ask for any of them
            continue
        where = f"The agent loop '{name}'"
        if name == _ENVIRONMENT:
            where = f"The environment '{agent.environment.name}'"
        check_roles(agent.policies, roles, where)
        known |= set(roles)

    unused = sorted(set(agent.policies) - known)
    if unused:
        raise ConfigError(
            f"{_SECTION}.agent.policies.{unused[0]} plays no role. Roles of the agent loops that "
            f"play the rows ({', '.join(sorted(names))}): {', '.join(sorted(known)) or 'none'}. "
            "Leave it out, or correct its name."
        )


def _roles_of_loop(config: RolloutConfig, name: str) -> tuple[str, ...] | None:
    """Return the roles of an agent loop; None where its code alone knows them."""
    if name == _ENVIRONMENT:
        assert config.agent.environment.name is not None, "the rows were checked"
        return roles_of(config.agent.environment.name)
    if name in _BUILT_IN:
        return ()
    return getattr(agent_loops.get(name), "roles", None)


def _loops_of_rows(config: RolloutConfig, column: Column) -> Iterator[tuple[str, str]]:
    """Give (file and row, name of the loop) of every row."""
    missing = {_ENVIRONMENT, GATEWAY_AGENT}
    for _, value, loop in _answering(config):
        if value is not None:
            missing.discard(loop)

    for place, name in column("agent_name"):
        chosen = str(name or config.agent_loop)
        if chosen not in agent_loops:
            raise DataError(
                f"{place}: agent_name is '{chosen}', which is no registered agent loop. Nearest "
                f"known: {nearest_names(chosen, list(agent_loops))}. "
                f"{_SECTION}.agent.agent_loop_config_path or model.external_lib registers yours."
            )
        if chosen in missing:
            settings = [setting for setting, _, loop in _answering(config) if loop == chosen]
            raise DataError(
                f"{place}: the row is played by {chosen}, which needs "
                f"{_SECTION}.{' or '.join(settings)}. Set it, or change the column agent_name."
            )
        yield place, chosen


def _rows(config: RolloutConfig, column: Column) -> Iterator[_Row]:
    """Give the loop and the options of every row."""
    names = ("extra_info", *_OPTIONS)
    columns = [column(name) for name in names]
    for (place, loop), *given in zip(_loops_of_rows(config, column), *columns):
        fields = {name: value for name, (_, value) in zip(names, given)}
        options = {name: option_of(fields, name) for name in _OPTIONS}
        yield _Row(place=place, loop=loop, **options)
