"""Qwen3-Coder: `<tool_call><function=f><parameter=p>value</parameter></function></tool_call>`.

Seed-OSS writes the same between tags of its own.
"""

from verl.agents.formats.base import (
    CallTags,
    TaggedFormat,
    ToolCall,
    ToolSchemas,
    malformed,
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

    def read(self, body: str, raw: str, tools: ToolSchemas) -> ToolCall:
        body = body.strip()
        name, _, rest = body.removeprefix(_FUNCTION).partition(">")
        name = name.strip()
        if not body.startswith(_FUNCTION) or not name or "<" in name:
            problem = f"it must begin with {_FUNCTION}TOOL>"
            return malformed(problem, self.tags.expected, raw=raw)
        if not rest.endswith(_FUNCTION_END):
            problem = f"it must end with {_FUNCTION_END}"
            return malformed(problem, self.tags.expected, raw=raw, name=name)

        body = rest.removesuffix(_FUNCTION_END)
        return call_of_tags(name, body, "<parameter=", tools, raw=raw, expected=self.tags.expected)


@tool_formats.register("qwen3_coder")
class Qwen3CoderFormat(_FunctionTags):
    """The tags of Qwen3-Coder."""

    tags = _TAGS


@tool_formats.register("seed")
class SeedFormat(_FunctionTags):
    """The tags of Seed-OSS."""

    tags = _SEED_TAGS
