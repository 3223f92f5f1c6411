"""Kimi-K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""

from dataclasses import replace

from verl.agents.formats.base import (
    CallTags,
    MalformedCallError,
    TaggedFormat,
    ToolCall,
    ToolSchemas,
    call_of,
    known_as,
    tool_formats,
)

_ARGUMENTS = "<|tool_call_argument_begin|>"
_TAGS = CallTags(
    opening="<|tool_call_begin|>",
    closing="<|tool_call_end|>",
    expected=f"<|tool_call_begin|>functions.TOOL:NUMBER{_ARGUMENTS}{{...}}<|tool_call_end|>",
    wrappers=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)


@tool_formats.register("kimi")
class KimiFormat(TaggedFormat):
    """A call's id, which names the tool, and JSON arguments."""

    tags = _TAGS

    def read(self, body: str, tools: ToolSchemas) -> ToolCall:
        call_id, separator, arguments = body.partition(_ARGUMENTS)
        call_id = call_id.strip()
        if not separator:
            raise MalformedCallError(f"{_ARGUMENTS} is missing")

        name = call_id.removeprefix("functions.")
        before, colon, number = name.rpartition(":")
        if colon and number.isdigit():
            name = before
        with known_as(name, call_id or None):
            return replace(call_of(name, arguments), call_id=call_id or None)
