"""Gemma: `<|tool_call>call:f{key:<|"|>text<|"|>,n:1}<tool_call|>`, and FunctionGemma's tags."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from verl.agents.formats.base import (
    CallTags,
    MalformedCallError,
    ParsedReply,
    ToolCall,
    ToolSchemas,
    after_space,
    known_as,
    parse_tagged,
    read_json,
    tool_formats,
)

_GEMMA_4 = CallTags(
    opening="<|tool_call>",
    closing="<tool_call|>",
    expected='<|tool_call>call:TOOL{name:<|"|>text<|"|>,other:1}<tool_call|>',
    reasoning=("<|channel>", "<channel|>"),
)
_FUNCTION_GEMMA = CallTags(
    opening="<start_function_call>",
    closing="<end_function_call>",
    expected=(
        "<start_function_call>call:TOOL{name:<escape>text<escape>,other:1}<end_function_call>"
    ),
)
T = TypeVar("T")

_MAX_DEPTH = 64
_KEY = re.compile(r'"?([^\s:{}\[\],"<]+)"?\s*:')
_BARE = re.compile(r"[^,{}\[\]<]+")


@tool_formats.register("gemma")
class GemmaFormat:
    """Objects with bare keys, and texts between a quote token."""

    def parse(self, text: str, tools: ToolSchemas) -> ParsedReply:
        """See `ToolFormat.parse`."""
        if _FUNCTION_GEMMA.opening in text:
            return parse_tagged(text, _FUNCTION_GEMMA, partial(_read, quote="<escape>"))
        return parse_tagged(text, _GEMMA_4, partial(_read, quote='<|"|>'))


def _read(body: str, *, quote: str) -> ToolCall:
    body = body.strip()
    head, brace, _ = body.partition("{")
    name = head.removeprefix("call:").strip()
    if not body.startswith("call:") or not name or not brace:
        raise MalformedCallError("it must begin with call:TOOL{")

    reader = _ValueReader(body, len(head), quote)
    with known_as(name):
        arguments = reader.read_object(depth=0)
        reader.end()
    return ToolCall(name=name, arguments=arguments)


class _ValueReader:
    """Reads values from left to right. Methods raise MalformedCallError."""

    def __init__(self, text: str, start: int, quote: str) -> None:
        self._text = text
        self._position = start
        self._quote = quote

    def end(self) -> None:
        """Check that nothing is left."""
        if not self._skip_space() == len(self._text):
            raise self._error("unexpected text after the arguments")

    def read_object(self, depth: int) -> dict[str, Any]:
        """Read `{key:value,...}`."""
        return dict(self._read_items("{}", partial(self._read_pair, depth + 1)))

    def _read_items(self, brackets: str, read_item: Callable[[], T]) -> list[T]:
        """Read items between brackets, with commas between them."""
        opening, closing = brackets
        self._expect(opening)
        if self._accept(closing):
            return []

        items = [read_item()]
        while self._accept(","):
            items.append(read_item())
        self._expect(closing)
        return items

    def _read_pair(self, depth: int) -> tuple[str, Any]:
        key = self._read_key()
        return key, self._read_value(depth)

    def _read_key(self) -> str:
        start = self._skip_space()
        if self._text.startswith(self._quote, start):
            key = self._read_text()
            self._expect(":")
            return key
        found = _KEY.match(self._text, start)
        if found is None:
            raise self._error("a key and a colon are missing")
        self._position = found.end()
        return found[1]

    def _read_value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise self._error("the arguments are nested too deeply")

        start = self._skip_space()
        if self._text.startswith(self._quote, start):
            return self._read_text()
        if self._text.startswith("{", start):
            return self.read_object(depth)
        if self._text.startswith("[", start):
            return self._read_items("[]", partial(self._read_value, depth + 1))

        found = _BARE.match(self._text, start)
        if found is None:
            raise self._error("a value is missing")
        self._position = found.end()
        return _bare_value(found[0].strip())

    def _read_text(self) -> str:
        start = self._skip_space() + len(self._quote)
        end = self._text.find(self._quote, start)
        if end < 0:
            raise self._error(f"a text is not closed by {self._quote}")
        self._position = end + len(self._quote)
        return self._text[start:end]

    def _skip_space(self) -> int:
        self._position = after_space(self._text, self._position)
        return self._position

    def _accept(self, character: str) -> bool:
        accepted = self._text.startswith(character, self._skip_space())
        self._position += accepted
        return accepted

    def _expect(self, character: str) -> None:
        if not self._accept(character):
            raise self._error(f"'{character}' is missing")

    def _error(self, problem: str) -> MalformedCallError:
        return MalformedCallError(f"{problem} at character {self._position}")


def _bare_value(word: str) -> Any:
    """Return a number, boolean or null; any other word is a text that lacks its quotes."""
    try:
        return read_json(word)
    except MalformedCallError:
        return word
