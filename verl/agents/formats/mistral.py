"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]f[ARGS]{...}`."""

import re
from dataclasses import replace
from functools import partial

from verl.agents.formats.base import (
    THINK,
    MalformedCallError,
    ParsedReply,
    ToolCall,
    ToolSchemas,
    call_from,
    joined,
    known_as,
    malformed,
    name_within,
    parse_after_reasoning,
    read_call,
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
        read = _read_named
        expected = _NAMED
        if stripped.startswith(("[", "{")):
            read = _read_list
            expected = _LIST

        try:
            found, end = read(stripped)
        except MalformedCallError as problem:
            found = [malformed(problem, expected, raw=_TAG + stripped)]
            end = len(stripped)
        calls.extend(found)
        pieces.append(stripped[end:])
    return ParsedReply(content=joined(pieces, calls), calls=tuple(calls))


def _read_list(text: str) -> tuple[list[ToolCall], int]:
    """Return the calls of a JSON list (or of one object), and where it ends."""
    with known_as(name_within(text)):
        value, end = read_json_at(text, 0)

    raw = _TAG + text[:end]
    values = value
    if not isinstance(value, list):
        values = [value]
    if not values:
        return [malformed(MalformedCallError("the list of calls is empty"), _LIST, raw=raw)], end

    calls = []
    for each in values:
        call = read_call(partial(call_from, each), _LIST, raw=raw)
        calls.append(replace(call, call_id=_valid_id(call.call_id)))
    return calls, end


def _read_named(text: str) -> tuple[list[ToolCall], int]:
    """Return the call that has its name before its arguments, and where it ends."""
    before, brace, _ = text.partition("{")
    head, _, _ = before.partition(_ARGUMENTS)
    name, _, call_id = head.partition(_ID)
    name = name.strip()

    if not name:
        raise MalformedCallError("the name of the tool is missing")
    with known_as(name):
        if not brace:
            raise MalformedCallError("the arguments are missing")
        arguments, end = read_json_at(text, len(before))
    raw = _TAG + text[:end]
    call_id = _valid_id(call_id.strip())
    return [ToolCall(name=name, arguments=arguments, raw=raw, call_id=call_id)], end


def _valid_id(call_id: str | None) -> str | None:
    """Return an id that the family's templates accept; None for any other."""
    if call_id and _VALID_ID.fullmatch(call_id):
        return call_id
    return None
