"""Decide where each tool of a run lives, and make the hosts."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from verl.agents.tools.base import BaseTool, check_names
from verl.agents.tools.config_file import ToolEntry, build_tools
from verl.agents.tools.functions import as_tool, load_function_tools
from verl.agents.tools.host import Host, LocalHost, ToolFacts
from verl.agents.tools.processes import NUM_PROCESSES, ProcessHost
from verl.utils.errors import ConfigError
from verl.utils.logging import say_once
from verl.utils.threads import LoopThread

# The order of tools in a prompt: by class, from the file of functions, given as objects.
_BY_CLASS, _FUNCTION, _OBJECT = range(3)
_KINDS = ("the tool configuration", "the file of functions", "the tools given as objects")
Ordered = tuple[tuple[int, int], BaseTool]


class Home(NamedTuple):
    """A tool with its host."""

    facts: ToolFacts
    host: Host


def make_homes(
    supervisor: LoopThread,
    entries: Sequence[ToolEntry],
    function_path: str | None,
    tools: Sequence[Any],
    num_processes: int = NUM_PROCESSES,
) -> dict[str, Home]:
    """Return {name: home} of all tools, in the order in which prompts list them.

    Args:
        supervisor: the loop that hosts are used from.
        tools: tools or functions, which live in this process.

    Raises:
        VerlError: a tool cannot be made, or two have one name.
    """
    ours = [entry for entry in entries if entry.isolation == "thread"]
    others = [entry for entry in entries if entry.isolation == "process"]
    local = ordered_tools(ours, None) + _given_tools(tools)
    homes: list[Home] = []

    if others or function_path is not None:
        processes = supervisor.submit(_start(others, function_path, num_processes)).result()
        homes += [Home(facts, processes) for facts in processes.facts if not _wants_thread(facts)]
        if any(_wants_thread(facts) for facts in processes.facts):
            # Here as well, once a process has survived the file.
            local += _thread_functions(function_path)
        if not homes:
            supervisor.call(processes.close)

    host = LocalHost(local)
    homes += [Home(facts, host) for facts in host.facts]
    named: dict[str, Home] = {}
    placed = []
    for home in sorted(homes, key=lambda home: home.facts.order):
        named[home.facts.name] = home
        placed.append((home.facts.name, _KINDS[home.facts.order[0]]))
        _warn_of_misspelled(home.facts)
    check_names(placed)
    return named


def ordered_tools(entries: Sequence[ToolEntry], function_path: str | None) -> list[Ordered]:
    """Return ((kind, position), tool) for tools by class and from a file of functions."""
    made: list[Ordered] = [((_BY_CLASS, number), tool) for number, tool in build_tools(entries)]
    if function_path is not None:
        functions = load_function_tools(function_path)
        made += [((_FUNCTION, number), tool) for number, tool in enumerate(functions)]
    return made


def _warn_of_misspelled(facts: ToolFacts) -> None:
    for key, setting in facts.misspelled.items():
        say_once(
            f"config.{key} of the tool '{facts.name}' is no setting of calls, and no method of the "
            f"tool's class names it. Nearest known: {setting}.",
            logging.WARNING,
        )


def _given_tools(tools: Sequence[Any]) -> list[Ordered]:
    made = []
    for number, value in enumerate(tools):
        tool = as_tool(value)
        if (tool.config or {}).get("isolation") == "process":
            raise ConfigError(
                f"The tool '{tool.name}' was given as an object, which lives in this process, but "
                "asks for isolation=process. Name its class in a tool configuration, or its file "
                "in multi_turn.function_tool_path."
            )
        made.append(((_OBJECT, number), tool))
    return made


def _wants_thread(facts: ToolFacts) -> bool:
    """Whether a function of a file asks for this process. Entries were sorted before."""
    return facts.order[0] == _FUNCTION and facts.isolation == "thread"


def _thread_functions(function_path: str | None) -> list[Ordered]:
    return [
        (order, tool)
        for order, tool in ordered_tools([], function_path)
        if tool.config.get("isolation") == "thread"
    ]


async def _start(
    entries: Sequence[ToolEntry], function_path: str | None, num_processes: int
) -> ProcessHost:
    host = ProcessHost(entries, function_path, num_processes=num_processes)
    try:
        await host.start()
    except BaseException:
        host.close()
        raise
    return host
