"""GLM-4.5 and later: `<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`."""

from verl.agents.formats.base import (
    CallTags,
    MalformedCallError,
    TaggedFormat,
    ToolCall,
    ToolSchemas,
    known_as,
    tool_formats,
)
from verl.agents.formats.typed import call_of_texts

_TAGS = CallTags(
    opening="<tool_call>",
    closing="</tool_call>",
    expected=("<tool_call>TOOL<arg_key>NAME</arg_key><arg_value>value</arg_value></tool_call>"),
)
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


@tool_formats.register("glm")
class GlmFormat(TaggedFormat):
    """Pairs of key and value, the values as text, converted by the tool's schema."""

    tags = _TAGS

    def read(self, body: str, tools: ToolSchemas) -> ToolCall:
        head, *pairs = body.split(_KEY)
        name = head.strip()
        if not name or "<" in name or "\n" in name:
            raise MalformedCallError("it must begin with the name of a tool")
        with known_as(name):
            texts = dict(map(_read_pair, pairs))
            return call_of_texts(name, texts, tools)


def _read_pair(text: str) -> tuple[str, str]:
    """Return key and value. Raises MalformedCallError."""
    key, closed, rest = text.partition(_KEY_END)
    key = key.strip()
    if not closed or not key:
        raise MalformedCallError(f"a key is not closed by {_KEY_END}")

    before, opened, rest = rest.partition(_VALUE)
    value, closed, after = rest.partition(_VALUE_END)
    if not opened or not closed or before.strip():
        raise MalformedCallError(f"key '{key}' must be followed by {_VALUE}value{_VALUE_END}")
    if after.strip():
        raise MalformedCallError(f"unexpected text after the value of '{key}'")
    return key, value
