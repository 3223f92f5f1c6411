"""Tools from the YAML file that `multi_turn.tool_config_path` names.

tools:
  - class_name: package.module.Class        # or path/to/file.py:Class
    config: {type: native}                  # settings of the class and of its calls
    tool_schema: {type: function, function: {...}}   # unless the class brings its own
  - class_name: verl.tools.mcp_search_tool.MCPSearchTool
    config: {type: mcp, rate_limit: 120}
    mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [search]}
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from verl.agents.entries import (
    find_class,
    find_file,
    folder_of,
    load_class,
    read_yaml,
    require_calls,
)
from verl.agents.json_types import JSON_CLASSES
from verl.agents.tools.base import (
    CALL_SETTINGS,
    BaseTool,
    as_schema,
    check_names,
    declared_keys,
    shut_down,
)
from verl.agents.tools.schemas import OpenAIFunctionParametersSchema, OpenAIFunctionToolSchema
from verl.utils.errors import ConfigError, VerlError, describe_error
from verl.utils.logging import say_once
from verl.utils.registry import misspelled, refuse_unknown
from verl.utils.signatures import call_by_name

_KEYS = ("class_name", "config", "tool_schema", "mcp")
_CALLS = {
    "create": ("instance_id",),
    "execute": ("instance_id", "parameters"),
    "calc_reward": ("instance_id",),
    "release": ("instance_id",),
}
OWN_PACKAGE = "verl."  # classes under it come with this package


class ToolType(Enum):
    """Kinds of entries: a class of Python, or the tools of MCP servers."""

    NATIVE = "native"
    MCP = "mcp"


@dataclass
class ToolEntry:
    """One checked entry of a tool configuration.

    `place` names file and entry, for errors; `number` counts from 1.
    """

    place: str
    number: int
    class_name: str
    config: dict[str, Any] = field(default_factory=dict)
    tool_schema: dict[str, Any] | None = None
    mcp: dict[str, Any] | None = None

    @property
    def kind(self) -> str:
        """Value of a `ToolType`."""
        return self.config.get("type", ToolType.NATIVE.value)

    @property
    def isolation(self) -> str:
        """Where its calls run: "process", or "thread" for a class of this package."""
        default = "thread" if self.class_name.startswith(OWN_PACKAGE) else "process"
        return self.config.get("isolation") or default


def initialize_tools_from_config(tools_config_file: str | Path) -> list[BaseTool]:
    """Return the tools of a YAML file, made in this process.

    Raises:
        ConfigError: the file, an entry or a key is wrong, or a class failed; the message names it.
    """
    return [tool for _, tool in build_tools(read_tool_config(tools_config_file))]


def read_tool_config(path: str | Path) -> list[ToolEntry]:
    """Return the entries of a YAML file, with the paths of `find_file`. No class is imported.

    Raises:
        ConfigError: file, entry and key that are wrong.
    """
    content = read_yaml(path, "multi_turn.tool_config_path")
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        found = f"{type(content if entries is None else entries).__name__}: {content!r:.80}"
        raise ConfigError(
            f"{path}: expected a list of tools under the key 'tools', got {found}. "
            "Write: tools: [{class_name: package.module.Class, config: {type: native}, "
            "tool_schema: {...}}]"
        )
    return [_check_entry(path, number, entry) for number, entry in enumerate(entries, 1)]


def build_tools(entries: Sequence[ToolEntry]) -> list[tuple[int, BaseTool]]:
    """Return (number of the entry, tool) for the tools of entries, in their order.

    Raises:
        ConfigError: a class is missing or failed, or two tools have the same name.
    """
    tools: list[tuple[int, BaseTool]] = []
    try:
        for entry in entries:
            tools += [(entry.number, tool) for tool in build_entry(entry)]
        places = {entry.number: entry.place for entry in entries}
        check_names((tool.name, places[number]) for number, tool in tools)
    except ConfigError:
        for _, tool in tools:  # a server of MCP runs until then
            shut_down(tool)
        raise
    return tools


def build_entry(entry: ToolEntry) -> list[BaseTool]:
    """Return the tools of one entry: one, or those of its MCP servers."""
    try:
        tool_class = get_tool_class(entry.class_name)
    except VerlError as error:
        raise ConfigError(f"{entry.place}, class_name: {error}") from error
    _check_config_keys(entry, tool_class)

    if entry.kind == ToolType.MCP.value:
        from verl.agents.tools.mcp import mcp_tools  # only where an entry asks for it

        assert entry.mcp is not None
        return mcp_tools(tool_class, entry.config, entry.mcp, place=entry.place)

    tool = make_tool(tool_class, entry.config, entry.tool_schema, place=entry.place)
    if not isinstance(tool, BaseTool):
        raise ConfigError(
            f"{entry.place}, class_name: {entry.class_name} must be a subclass of "
            "verl.tools.base_tool.BaseTool."
        )
    if not isinstance(getattr(tool, "name", None), str):
        raise ConfigError(
            f"{entry.place}: {entry.class_name} has no name. Call "
            "super().__init__(config, tool_schema) in its __init__."
        )
    if type(tool).execute is BaseTool.execute:
        raise ConfigError(
            f"{entry.place}: {entry.class_name} must override execute(instance_id, parameters, "
            "**kwargs), which answers the calls of the model."
        )
    require_calls(tool, _CALLS, entry.place)
    return [tool]


def _check_config_keys(entry: ToolEntry, tool_class: type[Any]) -> None:
    """Raise ConfigError for a key of `config` that a class does not read.

    This checks classes of this package, and those with `config_keys` in their own body. Another
    class may read keys that its base class does not declare.
    """
    if not issubclass(tool_class, BaseTool):
        return
    is_our_own = entry.class_name.startswith(OWN_PACKAGE)
    if not is_our_own and "config_keys" not in vars(tool_class):
        return

    try:
        declared = declared_keys(tool_class)
    except ConfigError as error:
        raise ConfigError(f"{entry.place}: {error}") from error
    refuse_unknown(f"{entry.place}, config", entry.config, ("type", *CALL_SETTINGS, *declared))


def make_tool(
    tool_class: type[Any], config: dict[str, Any], schema: dict[str, Any] | None, *, place: str
) -> Any:
    """Make one tool.

    Raises ConfigError, which begins with `place`, for a schema or a class that does not work.
    """
    try:
        tool_schema = None if schema is None else as_schema(schema)
        return call_by_name(tool_class, config=config, tool_schema=tool_schema)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{place}: {tool_class.__name__}(config, tool_schema) raised {describe_error(error)}"
        ) from error


def get_tool_class(cls_name: str) -> type[Any]:
    """Return the class `package.module.Class`, or `path/to/file.py:Class`; see `load_class`."""
    return load_class(cls_name)


def _check_entry(path: str | Path, number: int, entry: Any) -> ToolEntry:
    place = f"{path}, tools entry {number}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}: expected keys {', '.join(_KEYS)}, got {entry!r}.")
    refuse_unknown(place, entry, _KEYS)

    class_name = entry.get("class_name")
    if not isinstance(class_name, str) or not class_name:
        raise ConfigError(
            f"{place}, class_name: expected a class such as package.module.Class, got "
            f"{class_name!r}."
        )
    checked = ToolEntry(
        place=f"{place} ({class_name})",
        number=number,
        class_name=find_class(class_name, folder_of(path)),
        config=_mapping(place, entry, "config") or {},
        tool_schema=_mapping(place, entry, "tool_schema"),
        mcp=_mapping(place, entry, "mcp"),
    )
    _check_config(checked)
    if checked.mcp is not None:
        servers = str(checked.mcp["mcp_servers_config_path"])
        checked.mcp["mcp_servers_config_path"] = find_file(servers, folder_of(path))
    return checked


def _mapping(place: str, entry: dict[str, Any], key: str) -> dict[str, Any] | None:
    value = entry.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{place}, {key}: expected a mapping, got {value!r}.")
    return value


def _check_config(entry: ToolEntry) -> None:
    kinds = [kind.value for kind in ToolType]
    if entry.kind not in kinds:
        raise ConfigError(
            f"{entry.place}, config.type: expected one of {', '.join(kinds)}, got {entry.kind!r}."
        )

    if entry.mcp is not None and entry.kind != ToolType.MCP.value:
        raise ConfigError(
            f"{entry.place}: the key 'mcp' is for the tools of MCP servers. Set config.type=mcp, "
            "or leave the key out."
        )
    if entry.kind == ToolType.MCP.value and not (entry.mcp or {}).get("mcp_servers_config_path"):
        raise ConfigError(
            f"{entry.place}, mcp.mcp_servers_config_path: config.type=mcp needs the JSON file of "
            "its servers."
        )

    if entry.tool_schema is not None:
        try:
            schema = as_schema(entry.tool_schema)
        except ConfigError as error:
            raise ConfigError(f"{entry.place}: {error}") from error
        _check_schema(f"{entry.place}, tool_schema", entry.tool_schema, schema)
    check_call_settings(entry.config, f"{entry.place}, config")


def _check_schema(place: str, given: dict[str, Any], schema: OpenAIFunctionToolSchema) -> None:
    """Refuse misspelled keys and types of a schema, and required parameters without a description.

    Other unknown keys are kept: JSON Schema has many.
    """
    function = given["function"]
    parameters = function.get("parameters") or {}
    for where, keys, known in (
        ("", given, ("type", "function")),
        (".function", function, ("name", "description", "parameters", "strict")),
        (".function.parameters", parameters, ("type", "properties", "required")),
    ):
        missing = [name for name in known if name not in keys]
        for key in keys:
            meant = misspelled(str(key), missing)
            if key not in known and meant is not None:
                raise ConfigError(f"{place}{where}: unknown key '{key}'. Nearest: {meant}.")

    if not schema.function.name.strip():
        raise ConfigError(f"{place}.function.name is empty. Name the tool: the model calls it so.")

    declared = schema.function.parameters
    if declared.type != "object":
        raise ConfigError(
            f"{place}.function.parameters.type must be object, got '{declared.type}': a call has "
            "named arguments. Describe each under properties."
        )
    _check_types(f"{place}.function.parameters.properties", declared)
    for name in declared.required:
        if declared.properties and name not in declared.properties:
            raise ConfigError(
                f"{place}.function.parameters.required names '{name}', which is none of the "
                f"properties: {', '.join(declared.properties)}."
            )


def _check_types(place: str, parameters: OpenAIFunctionParametersSchema) -> None:
    """Refuse misspelled types of parameters, and warn of others that JSON does not have."""
    for name, described in parameters.properties.items():
        kinds = [described.type] if isinstance(described.type, str) else described.type or []
        for kind in kinds:
            if kind in JSON_CLASSES:
                continue
            meant = misspelled(kind, JSON_CLASSES)
            if meant is not None:
                raise ConfigError(f"{place}.{name}.type: unknown '{kind}'. Nearest: {meant}.")

            say_once(
                f"{place}.{name}.type is '{kind}', which is no type of JSON, so arguments are not "
                f"checked against it. Types are: {', '.join(JSON_CLASSES)}.",
                logging.WARNING,
            )


def check_call_settings(config: dict[str, Any], place: str) -> None:
    """Check the keys of a tool's `config` that decide how it is called.

    Raises:
        ConfigError: the key and its value.
    """
    isolation = config.get("isolation")
    if isolation not in (None, "thread", "process"):
        raise ConfigError(f"{place}.isolation: expected thread or process, got {isolation!r}.")
    parallel = config.get("parallel")
    if not isinstance(parallel, (bool, type(None))):
        raise ConfigError(f"{place}.parallel: expected true or false, got {parallel!r}.")
    for key, least in (("timeout_s", None), ("retries", 0), ("retry_delay_s", 0)):
        value = config.get(key)
        if value is None:
            continue
        if not is_number(value) or (value <= 0 if least is None else value < least):
            bound = "above 0" if least is None else f"at least {least}"
            raise ConfigError(f"{place}.{key}: expected a number {bound}, got {value!r}.")


def is_number(value: Any) -> bool:
    """Return whether a value of a file is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)
