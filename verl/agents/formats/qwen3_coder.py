"""Qwen3-Coder: `<tool_call><function=f><parameter=p>value</parameter></function></tool_call>`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from verl.agents.formats.base import (
    CallTags,
    MalformedCallError,
    ParsedReply,
    ToolCall,
    malformed,
    parse_tagged,
    tool_formats,
)
from verl.agents.formats.typed import call_of_texts

_TAGS = CallTags(
    opening="<tool_call>",
    closing="</tool_call>",
    expected=("<tool_call><function=TOOL><parameter=NAME>value</parameter></function></tool_call>"),
)
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


@tool_formats.register("qwen3_coder")
class Qwen3CoderFormat:
    """Parameters as text between tags, converted by the tool's schema."""

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
        """See `ToolFormat.parse`."""
        return parse_tagged(text, _TAGS, partial(self._read, tools=tools))

    def _read(self, body: str, raw: str, *, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
        body = body.strip()
        name, _, rest = body.removeprefix(_FUNCTION).partition(">")
        name = name.strip()
        if not body.startswith(_FUNCTION) or not name or "<" in name:
            problem = f"it must begin with {_FUNCTION}TOOL>"
            return malformed(problem, _TAGS.expected, raw=raw)
        if not rest.endswith(_FUNCTION_END):
            problem = f"it must end with {_FUNCTION_END}"
            return malformed(problem, _TAGS.expected, raw=raw, name=name)

        try:
            texts = _parameters(rest.removesuffix(_FUNCTION_END))
        except MalformedCallError as problem:
            return malformed(str(problem), _TAGS.expected, raw=raw, name=name)
        return call_of_texts(name, texts, tools, raw=raw, expected=_TAGS.expected)


def _parameters(text: str) -> dict[str, str]:
    """Return the text of each parameter. Raises MalformedCallError."""
    texts: dict[str, str] = {}
    pieces = text.split(_PARAMETER)
    if pieces[0].strip():
        raise MalformedCallError(f"unexpected text before {_PARAMETER}NAME>")

    for piece in pieces[1:]:
        name, opened, rest = piece.partition(">")
        value, closed, after = rest.partition(_PARAMETER_END)
        name = name.strip()
        if not opened or not name:
            raise MalformedCallError(f"a parameter lacks its name in {_PARAMETER}NAME>")
        if not closed:
            raise MalformedCallError(f"parameter '{name}' is not closed by {_PARAMETER_END}")
        if after.strip():
            raise MalformedCallError(f"unexpected text after parameter '{name}'")
        if name in texts:
            raise MalformedCallError(f"parameter '{name}' is given twice")
        # One line break on each side is layout; others belong to the value.
        texts[name] = value.removeprefix("\n").removesuffix("\n")
    return texts
