"""Llama 3: `{"name": ..., "parameters": {...}}` as the reply, or behind `<|python_tag|>`."""

import re
from functools import partial
from typing import Any

from verl.agents.formats.base import (
    MalformedCallError,
    ParsedReply,
    ToolCall,
    ToolSchemas,
    call_from,
    joined,
    malformed,
    name_within,
    parse_after_reasoning,
    read_call,
    read_json_at,
    tool_formats,
    without_end,
)

_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")
_EXPECTED = '{"name": "<tool>", "parameters": {...}}, several separated by "; "'
_LINE = re.compile(r"^[ \t]*\{", re.MULTILINE)
_SEPARATOR = re.compile(r"\s*;?\s*")


@tool_formats.register("llama3_json")
class Llama3JsonFormat:
    """JSON objects without tags: at the beginning of a line, or behind <|python_tag|>."""

    def parse(self, text: str, tools: ToolSchemas) -> ParsedReply:
        """See `ToolFormat.parse`. A JSON object that is no call stays content."""
        return parse_after_reasoning(without_end(text), _parse)


def _parse(text: str, start: int) -> ParsedReply:
    tag = text.find(_TAG, start)
    if tag >= 0:
        calls, end = _read_calls(text, tag + len(_TAG), tagged=True)
        return _reply(text[:tag], calls, text[end:])

    line = _LINE.search(text, start)
    if line is None:
        return _reply(text, [], "")
    calls, end = _read_calls(text, line.end() - 1, tagged=False)
    if not calls:
        return _reply(text, [], "")
    return _reply(text[: line.start()], calls, text[end:])


def _reply(before: str, calls: list[ToolCall], after: str) -> ParsedReply:
    return ParsedReply(content=joined([before, after], calls), calls=tuple(calls))


def _read_calls(text: str, start: int, *, tagged: bool) -> tuple[list[ToolCall], int]:
    """Return the calls that begin at `start` one behind the other, and where the text goes on.

    Behind the tag everything is meant as a call; elsewhere only an object that looks like one.
    """
    calls: list[ToolCall] = []
    position = last_end = start
    while position < len(text):
        if calls and not tagged and text[position] != "{":
            break

        try:
            value, end = read_json_at(text, position)
        except MalformedCallError as problem:
            raw = text[position:]
            has_key = any(f'"{key}"' in raw for key in ("name", *_KEYS))
            if tagged or has_key:
                problem.name = name_within(raw)
                return [*calls, malformed(problem, _EXPECTED, raw=raw)], len(text)
            break

        if not tagged and not (isinstance(value, dict) and _looks_like_a_call(value)):
            break
        read = partial(call_from, value, _KEYS)
        calls.append(read_call(read, _EXPECTED, raw=text[position:end]))
        last_end = end
        separator = _SEPARATOR.match(text, end)
        position = separator.end() if separator else end
    return calls, last_end


def _looks_like_a_call(value: dict[str, Any]) -> bool:
    """Return whether an object is meant as a call, also one that misses the other half."""
    return "parameters" in value or "arguments" in value or set(value) == {"name"}
