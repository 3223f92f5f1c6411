"""Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Qwen2.5 and Qwen3 write it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.formats.base import (
    CallTags,
    ParsedReply,
    ToolCall,
    call_from_json,
    parse_tagged,
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
class HermesFormat:
    """JSON between <tool_call> tags."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
        """See `ToolFormat.parse`."""
        return parse_tagged(text, _TAGS, self._read)

    def _read(self, body: str, raw: str) -> ToolCall:
        return call_from_json(body, raw=raw, expected=_TAGS.expected)
