"""MiniMax-M2: `<invoke name="f"><parameter name="p">value</parameter></invoke>`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from verl.agents.formats.base import (
    CallTags,
    ParsedReply,
    ToolCall,
    malformed,
    parse_tagged,
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
class MinimaxFormat:
    """Parameters as text between tags, converted by the tool's schema."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
        """See `ToolFormat.parse`."""
        return parse_tagged(text, _TAGS, partial(self._read, tools=tools))

    def _read(self, body: str, raw: str, *, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
        name, opened, rest = body.partition(">")
        name = name.strip().strip('"')
        if not opened or not name or "<" in name:
            return malformed("the name of the tool is missing", _TAGS.expected, raw=raw)

        return call_of_tags(name, rest, "<parameter name=", tools, raw=raw, expected=_TAGS.expected)
