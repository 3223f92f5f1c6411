"""MiniMax-M2: `<invoke name="f"><parameter name="p">value</parameter></invoke>`."""

from verl.agents.formats.base import (
    CallTags,
    MalformedCallError,
    TaggedFormat,
    ToolCall,
    ToolSchemas,
    tool_formats,
)
from verl.agents.formats.typed import call_of_tags

_TAGS = CallTags(
    opening="<invoke name=",
    closing="</invoke>",
    expected=(
        '<minimax:tool_call><invoke name="TOOL"><parameter name="NAME">value</parameter></invoke>'
        "</minimax:tool_call>"
    ),
    wrappers=("<minimax:tool_call>", "</minimax:tool_call>"),
)


@tool_formats.register("minimax")
class MinimaxFormat(TaggedFormat):
    """Parameters as text between tags, converted by the tool's schema."""

    tags = _TAGS

    def read(self, body: str, tools: ToolSchemas) -> ToolCall:
        name, opened, rest = body.partition(">")
        name = name.strip().strip('"')
        if not opened or not name or "<" in name:
            raise MalformedCallError("the name of the tool is missing")
        return call_of_tags(name, rest, "<parameter name=", tools)
