"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]f[ARGS]{...}`."""

import re
from dataclasses import replace

from verl.agents.formats.base import (
    THINK,
    MalformedCallError,
    ParsedReply,
    ToolCall,
    ToolSchemas,
    call_from,
    joined,
    malformed,
    name_within,
    parse_after_reasoning,
    read_json_at,
    tool_formats,
    without_end,
)

_TAG = "[TOOL_CALLS]"
_ID, _ARGUMENTS = "[CALL_ID]", "[ARGS]"
_VALID_ID = re.compile(r"[a-zA-Z0-9]{9}")
_THINK = ("[THINK]", "[/THINK]")
_LIST = '[TOOL_CALLS][{"name": "<tool>", "arguments": {...}}]'
_NAMED = "[TOOL_CALLS]TOOL[ARGS]{...}"


@tool_formats.register("mistral")
class MistralFormat:
    """A JSON list behind one tag (until 2024), or one tag for each call (since then)."""

    def parse(self, text: str, tools: ToolSchemas) -> ParsedReply:
        """See `ToolFormat.parse`."""
        tags = _THINK if _THINK[1] in text or _THINK[0] in text else THINK
        return parse_after_reasoning(without_end(text, extra=("</s>",)), _parse, tags)


def _parse(text: str, start: int) -> ParsedReply:
    before, *segments = text[start:].split(_TAG)
    pieces = [text[:start], before]
    calls: list[ToolCall] = []
    for segment in segments:
        stripped = segment.lstrip()
        if stripped.startswith(("[", "{")):
            found, rest = _read_list(stripped)
        else:
            found, rest = _read_named(stripped)
        calls.extend(found)
        pieces.append(rest)
    return ParsedReply(content=joined(pieces, calls), calls=tuple(calls))


def _read_list(text: str) -> tuple[list[ToolCall], str]:
    """Return the calls of a JSON list (or of one object), and the text behind it."""
    try:
        value, end = read_json_at(text, 0)
    except MalformedCallError as problem:
        raw = _TAG + text
        return [malformed(str(problem), _LIST, raw=raw, name=name_within(text))], ""

    raw = _TAG + text[:end]
    values = value
    if not isinstance(value, list):
        values = [value]
    if not values:
        return [malformed("the list of calls is empty", _LIST, raw=raw)], text[end:]
    calls = []
    for each in values:
        call = call_from(each, raw=raw, expected=_LIST)
        calls.append(replace(call, call_id=_valid_id(call.call_id)))
    return calls, text[end:]


def _read_named(text: str) -> tuple[list[ToolCall], str]:
    """Return the call that has its name before its arguments, and the text behind it."""
    brace = text.find("{")
    head = text
    if brace >= 0:
        head = text[:brace]
    head, _, _ = head.partition(_ARGUMENTS)
    name, _, call_id = head.partition(_ID)
    name = name.strip()

    if not name:
        problem = "the name of the tool is missing"
        return [malformed(problem, _NAMED, raw=_TAG + text)], ""
    if brace < 0:
        problem = "the arguments are missing"
        return [malformed(problem, _NAMED, raw=_TAG + text, name=name[:128])], ""
    try:
        arguments, end = read_json_at(text, brace)
    except MalformedCallError as problem:
        return [malformed(str(problem), _NAMED, raw=_TAG + text, name=name)], ""
    call = ToolCall(
        name=name, arguments=arguments, raw=_TAG + text[:end], call_id=_valid_id(call_id.strip())
    )
    return [call], text[end:]


def _valid_id(call_id: str | None) -> str | None:
    """Return an id that the family's templates accept; None for any other."""
    if call_id and _VALID_ID.fullmatch(call_id):
        return call_id
    return None
