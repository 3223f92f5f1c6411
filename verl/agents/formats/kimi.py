"""Kimi-K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""

from verl.agents.formats.base import (
    CallTags,
    TaggedFormat,
    ToolCall,
    ToolSchemas,
    malformed,
    read_arguments,
    tool_formats,
    with_id,
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

    def read(self, body: str, raw: str, tools: ToolSchemas) -> ToolCall:
        call_id, separator, arguments = body.partition(_ARGUMENTS)
        call_id = call_id.strip()
        if not separator:
            return malformed(f"{_ARGUMENTS} is missing", self.tags.expected, raw=raw)

        name = call_id.removeprefix("functions.")
        before, colon, number = name.rpartition(":")
        if colon and number.isdigit():
            name = before
        call = read_arguments(arguments, name, raw=raw, expected=self.tags.expected)
        return with_id(call, call_id)
