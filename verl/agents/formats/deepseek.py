"""DeepSeek: JSON between tool-call tokens (V3, R1, V3.1), or DSML tags (V3.2 and later)."""

import re
from typing import Any

from verl.agents.formats.base import (
    CallTags,
    MalformedCallError,
    ParsedReply,
    ToolCall,
    ToolSchemas,
    call_of,
    known_as,
    parse_tagged,
    read_json,
    tool_formats,
)

_SEPARATOR = "<｜tool▁sep｜>"
_TOKENS = CallTags(
    opening="<｜tool▁call▁begin｜>",
    closing="<｜tool▁call▁end｜>",
    expected=f"<｜tool▁call▁begin｜>TOOL{_SEPARATOR}{{...}}<｜tool▁call▁end｜>",
    wrappers=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
_DSML = CallTags(
    opening="<｜DSML｜invoke",
    closing="</｜DSML｜invoke>",
    expected=(
        '<｜DSML｜invoke name="TOOL"><｜DSML｜parameter name="NAME" string="true|false">'
        "value</｜DSML｜parameter></｜DSML｜invoke>"
    ),
    wrappers=(
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
    ),
)
_PARAMETER, _PARAMETER_END = "<｜DSML｜parameter", "</｜DSML｜parameter>"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


@tool_formats.register("deepseek")
class DeepseekFormat:
    """JSON arguments after the tool's name, or DSML parameters."""

    def parse(self, text: str, tools: ToolSchemas) -> ParsedReply:
        """See `ToolFormat.parse`."""
        if _DSML.opening in text:
            return parse_tagged(text, _DSML, _read_dsml)
        return parse_tagged(text, _TOKENS, _read_tokens)


def _read_tokens(body: str) -> ToolCall:
    before, separator, after = body.partition(_SEPARATOR)
    if not separator:
        raise MalformedCallError(f"{_SEPARATOR} is missing")

    # V3.1 writes the name before the separator; V3 and R1 write "function" there, then the name
    # on a line of its own and the arguments in a code block.
    if after.lstrip().startswith("{"):
        return call_of(before.strip(), after)
    name, _, block = after.partition("\n")
    arguments = block.strip().removeprefix("```json").removesuffix("```")
    return call_of(name.strip(), arguments)


def _read_dsml(body: str) -> ToolCall:
    head, _, rest = body.partition(">")
    name = _attributes(head).get("name", "").strip()
    if not name:
        raise MalformedCallError("the name of the tool is missing")

    first, *pieces = rest.split(_PARAMETER)
    with known_as(name):
        if first.strip():
            raise MalformedCallError(f"unexpected text before {_PARAMETER}")
        arguments = dict(map(_read_parameter, pieces))
    return ToolCall(name=name, arguments=arguments)


def _read_parameter(text: str) -> tuple[str, Any]:
    """Return name and value of a DSML parameter. Raises MalformedCallError."""
    head, _, rest = text.partition(">")
    attributes = _attributes(head)
    key = attributes.get("name", "").strip()
    if not key:
        raise MalformedCallError("a parameter lacks its name")

    value, closed, after = rest.partition(_PARAMETER_END)
    if not closed:
        raise MalformedCallError(f"parameter '{key}' is not closed by {_PARAMETER_END}")
    if after.strip():
        raise MalformedCallError(f"unexpected text after parameter '{key}'")
    if attributes.get("string") == "false":
        return key, read_json(value)
    return key, value


def _attributes(head: str) -> dict[str, str]:
    return dict(_ATTRIBUTE.findall(head))
