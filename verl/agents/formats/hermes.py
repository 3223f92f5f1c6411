"""Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Qwen2.5 and Qwen3 write it.
"""

from verl.agents.formats.base import (
    CallTags,
    TaggedFormat,
    ToolCall,
    ToolSchemas,
    call_from,
    known_as,
    name_within,
    read_json,
    tool_formats,
)

_TAGS = CallTags(
    opening="<tool_call>",
    closing="</tool_call>",
    expected='<tool_call>{"name": "<tool>", "arguments": {...}}</tool_call>',
    json_body=True,
)


@tool_formats.register("qwen")
@tool_formats.register("hermes")
class HermesFormat(TaggedFormat):
    """JSON between <tool_call> tags."""

    tags = _TAGS

    def read(self, body: str, tools: ToolSchemas) -> ToolCall:
        with known_as(name_within(body)):
            value = read_json(body)
        return call_from(value)
