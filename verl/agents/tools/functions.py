"""Tools from plain functions.

    @function_tool
    def add(a: int, b: int = 0) -> str:
        '''Add two numbers.

        Args:
            a: the first number
            b: the second number
        '''
        return str(a + b)

The schema comes from signature and docstring. Arguments are checked against it, and converted. A
function returns a text, a dict, a ToolResponse, or one of them with step reward and metrics. A
parameter named `agent_data` is not part of the schema; it gets the data of the agent loop. A plain
function runs in a thread, a coroutine function in the event loop of the tools.
"""

import ast
import inspect
import re
import typing
from collections.abc import Callable, Container, Mapping, Sequence
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from verl.agents.tools.base import (
    AGENT_DATA,
    CALL_SETTINGS,
    BaseTool,
    ToolArgumentError,
    as_schema,
    check_names,
)
from verl.agents.tools.config_file import check_call_settings
from verl.agents.tools.threads import run_in_thread
from verl.utils.errors import ConfigError
from verl.utils.imports import load_module
from verl.utils.registry import refuse_unknown
from verl.utils.signatures import declares

_MARK = "_verl_function_tool"
_ARGUMENT_SECTIONS = ("args", "arguments", "parameters")
_SECTION = re.compile(r"^(\w[\w ]*):\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class FunctionTool(BaseTool):
    """A function that a model can call. It keeps nothing between calls.

    Args:
        name, description: instead of those of the function.
        config: settings of its calls, see `verl.agents.tools.base`.

    Raises:
        ConfigError: no docstring, a parameter without annotation, or one that JSON has no name
            for.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.function = function
        text, arguments = read_docstring(inspect.getdoc(function) or "")
        self._arguments = _arguments_model(function, arguments)
        schema = _schema(self._arguments, name or _name(function), description or text)
        super().__init__(dict(config or {}), as_schema(schema))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], agent_data: Any = None, **kwargs: Any
    ) -> Any:
        """Call the function with the model's arguments, and the row's `execute_kwargs`.

        Raises:
            ToolArgumentError: the arguments do not fit the signature.
        """
        arguments = self._check({**parameters, **kwargs})
        if self.takes_agent_data(is_copied=False):
            arguments[AGENT_DATA] = agent_data
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments)

        value = await run_in_thread(self.function, **arguments)
        return await value if inspect.isawaitable(value) else value

    def takes_agent_data(self, *, is_copied: bool) -> bool:
        """Return whether the function has a parameter for the state of the episode."""
        return declares(self.function, AGENT_DATA)

    def _check(self, parameters: dict[str, Any]) -> dict[str, Any]:
        try:
            checked = self._arguments.model_validate(parameters)
        except ValidationError as error:
            problems = [_describe(problem) for problem in error.errors()]
            raise ToolArgumentError(
                f"the arguments of '{self.name}' do not fit: {'; '.join(problems[:5])}"
            ) from None
        fields = type(checked).model_fields
        return {field.alias or name: getattr(checked, name) for name, field in fields.items()}


def function_tool(
    function: Any = None,
    *,
    name: str | None = None,
    description: str | None = None,
    **config: Any,
) -> Any:
    """Mark a function as a tool: `@function_tool`, or `@function_tool(timeout_s=5)`.

    The function stays as it is. Marking does nothing by itself: name its file in
    `multi_turn.function_tool_path`, or give the function to `ToolSet.from_config(tools=...)`.

    Args:
        config: settings of its calls, such as `isolation`, `timeout_s` and `retries`.
    """
    if isinstance(function, str):  # @function_tool("name")
        name, function = function, None
    settings = {"name": name, "description": description, "config": config}

    def mark(marked: Any) -> Any:
        setattr(marked, _MARK, settings)
        return marked

    return mark if function is None else mark(function)


def as_tool(value: Any) -> BaseTool:
    """Return a tool for a tool or a function.

    Raises:
        ConfigError: it is neither, or cannot be one.
    """
    if isinstance(value, BaseTool):
        return value
    if not callable(value):
        raise ConfigError(f"A tool must be a BaseTool or a function, got {type(value).__name__}.")
    if inspect.isclass(value):
        raise ConfigError(
            f"A tool must be a BaseTool or a function, got the class '{value.__name__}'. Name a "
            "class in multi_turn.tool_config_path, or mark a function."
        )
    settings = getattr(value, _MARK, {})
    config = settings.get("config", {})
    tool = FunctionTool(value, **settings)
    place = f"@function_tool of '{tool.name}'"
    refuse_unknown(place, config, CALL_SETTINGS)
    check_call_settings(config, place)
    return tool


def load_function_tools(path: str) -> list[BaseTool]:
    """Return the tools of a Python file, in the order of the file.

    These are the functions that `@function_tool` marks; in a file without a mark, all public
    functions that it defines.

    Raises:
        ConfigError: the file fails, has no function, or two of its tools have one name.
    """
    module = load_module(path, "multi_turn.function_tool_path")
    # Marks may stand on more than plain functions, such as one that functools.lru_cache wraps.
    marked = [value for value in vars(module).values() if _MARK in getattr(value, "__dict__", ())]
    public = [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not value.__name__.startswith("_")
    ]
    chosen = marked or public
    if not chosen:
        raise ConfigError(
            f"multi_turn.function_tool_path: '{path}' defines no function. Write one with "
            "@function_tool (verl.agents.tools); a class is named in a YAML file, "
            "multi_turn.tool_config_path."
        )

    _refuse_second_definitions(path, module, [_name(function) for function in chosen])

    tools = []
    for function in dict.fromkeys(chosen):
        try:
            tools.append(as_tool(function))
        except ConfigError as error:
            raise ConfigError(f"'{path}': {error}") from error
    check_names((tool.name, f"'{path}'") for tool in tools)
    return tools


def _refuse_second_definitions(path: str, module: ModuleType, names: Container[str]) -> None:
    """Raise ConfigError for a tool that the file defines twice: Python keeps the second alone."""
    tree = ast.parse(inspect.getsource(module))
    lines: dict[str, int] = {}  # of the first definition

    for statement in tree.body:
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue

        name = statement.name
        line = statement.lineno
        first = lines.setdefault(name, line)
        if first != line and name in names:
            raise ConfigError(
                f"'{path}', line {line}: the function '{name}' is defined again, so the model "
                f"would not be offered that of line {first}. Rename one."
            )


def _arguments_model(
    function: Callable[..., Any], descriptions: Mapping[str, str]
) -> type[BaseModel]:
    """Return a model of the arguments, which checks and converts them."""
    label = f"the tool function '{_name(function)}'"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{label} has a yield. Return the whole answer instead.")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise ConfigError(f"{label}: an annotation cannot be read: {error}.") from error

    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == AGENT_DATA:
            continue
        _check_parameter(label, parameter, hints)
        default = ... if parameter.default is parameter.empty else parameter.default
        settings: dict[str, Any] = {}
        if parameter.name in descriptions:
            settings["description"] = descriptions[parameter.name]
        # Under an alias: names such as `schema` or `_x` would clash with the model's own.
        described = Field(default, alias=parameter.name, **settings)
        fields[f"argument_{len(fields)}"] = (hints[parameter.name], described)

    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    return create_model(_name(function), __config__=config, **fields)


def _check_parameter(label: str, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise ConfigError(f"{label} has '{parameter}'. Name each parameter, with its type.")
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise ConfigError(f"{label}: '{parameter.name}' must be allowed as a keyword.")
    if parameter.name not in hints:
        raise ConfigError(
            f"{label}: the parameter '{parameter.name}' has no type. Annotate it, such as "
            f"{parameter.name}: str."
        )


def _schema(arguments: type[BaseModel], name: str, description: str) -> dict[str, Any]:
    label = f"the tool function '{arguments.__name__}'"
    if not description:
        raise ConfigError(f"{label} has no docstring. Write one: the model reads it.")
    try:
        parameters = _simple(arguments.model_json_schema())
    except Exception as error:
        raise ConfigError(f"{label} has a parameter that JSON cannot hold: {error}") from error

    parameters.pop("additionalProperties", None)
    parameters.setdefault("properties", {})
    parameters.setdefault("required", [])
    function = {
        "name": name,
        "description": description,
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


def _simple(schema: Any) -> Any:
    """Return a JSON schema without titles, and without null as an alternative to one type."""
    if isinstance(schema, list):
        return [_simple(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema

    simple = {}
    for key, value in schema.items():
        if key == "properties":
            simple[key] = {name: _simple(entry) for name, entry in value.items()}
        elif key == "default":
            if value is not None:
                simple[key] = value
        elif key != "title":
            simple[key] = _simple(value)

    others = [entry for entry in simple.get("anyOf", []) if entry != {"type": "null"}]
    if len(others) == 1:
        del simple["anyOf"]
        simple = {**others[0], **simple}
    return simple


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of a Google docstring, and that of each argument.

    The description is the text before the first section.
    """
    description: list[str] = []
    argument_lines: list[str] = []
    section = ""
    for line in text.splitlines():
        header = _SECTION.match(line)
        if header:
            section = header.group(1).lower()
        elif not section:
            description.append(line)
        elif section in _ARGUMENT_SECTIONS and line.strip():
            argument_lines.append(line)
    return "\n".join(description).strip(), _read_arguments(argument_lines)


def _read_arguments(lines: Sequence[str]) -> dict[str, str]:
    """Return {name: description}. Lines that are indented further go on with the one before."""
    indents = [len(line) - len(line.lstrip()) for line in lines]
    first_indent = min(indents, default=0)
    arguments: dict[str, str] = {}
    current = ""
    for line, indent in zip(lines, indents):
        found = _ARGUMENT.match(line.strip())
        if found and indent == first_indent:
            current = found.group(1)
            arguments[current] = found.group(2)
        elif current:
            arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    return arguments


def _describe(problem: Mapping[str, Any]) -> str:
    place = ".".join(map(str, problem["loc"]))
    return f"{place}: {problem['msg']}"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
