"""Qwen3-Coder: `<tool_call><function=f><parameter=p>value</parameter></function></tool_call>`.

Seed-OSS writes the same between tags of its own.
"""

from verl.agents.formats.base import (
    CallTags,
    MalformedCallError,
    TaggedFormat,
    ToolCall,
    ToolSchemas,
    tool_formats,
)
from verl.agents.formats.typed import call_of_tags

_BODY = "<function=TOOL><parameter=NAME>value</parameter></function>"
_TAGS = CallTags(
    opening="<tool_call>",
    closing="</tool_call>",
    expected=f"<tool_call>{_BODY}</tool_call>",
)
_SEED_TAGS = CallTags(
    opening="<seed:tool_call>",
    closing="</seed:tool_call>",
    expected=f"<seed:tool_call>{_BODY}</seed:tool_call>",
    reasoning=("<seed:think>", "</seed:think>"),
)
_FUNCTION, _FUNCTION_END = "<function=", "</function>"


class _FunctionTags(TaggedFormat):
    """Parameters as text between tags, converted by the tool's schema."""

    def read(self, body: str, tools: ToolSchemas) -> ToolCall:
        body = body.strip()
        name, _, rest = body.removeprefix(_FUNCTION).partition(">")
        name = name.strip()
        if not body.startswith(_FUNCTION) or not name or "<" in name:
            raise MalformedCallError(f"it must begin with {_FUNCTION}TOOL>")
        if not rest.endswith(_FUNCTION_END):
            raise MalformedCallError(f"it must end with {_FUNCTION_END}", name)
        return call_of_tags(name, rest.removesuffix(_FUNCTION_END), "<parameter=", tools)


@tool_formats.register("qwen3_coder")
class Qwen3CoderFormat(_FunctionTags):
    """The tags of Qwen3-Coder."""

    tags = _TAGS


@tool_formats.register("seed")
class SeedFormat(_FunctionTags):
    """The tags of Seed-OSS."""

    tags = _SEED_TAGS
