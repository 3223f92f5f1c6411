"""gpt-oss (harmony): messages on channels; one to `functions.f` is a call of the tool f."""

import re
from dataclasses import dataclass
from functools import partial

from verl.agents.formats.base import (
    MalformedCallError,
    ParsedReply,
    ToolCall,
    ToolSchemas,
    call_of,
    joined,
    malformed,
    read_call,
    tool_formats,
)

_EXPECTED = "<|channel|>commentary to=functions.TOOL <|constrain|>json<|message|>{...}<|call|>"
_BETWEEN = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)")
_TO = re.compile(r"\s*to=functions\.")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass
class _Message:
    header: str
    body: str | None  # None: the reply ends within the header

    @property
    def recipient(self) -> str | None:
        found = _RECIPIENT.search(self.header)
        return found[1] if found else None

    @property
    def channel(self) -> str:
        found = _CHANNEL.search(self.header)
        return found[1] if found else "final"


@tool_formats.register("gpt-oss")
class GptOssFormat:
    """Harmony messages: analysis is reasoning; content is final, or commentary to no recipient."""

    def parse(self, text: str, tools: ToolSchemas) -> ParsedReply:
        """See `ToolFormat.parse`."""
        pieces: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []

        for message in _messages(text):
            if message.recipient is not None:
                calls.append(_read(message, message.recipient))
            elif message.channel == "analysis":
                reasoning.append(message.body or "")
            else:
                pieces.append(message.body or "")
        return ParsedReply(
            content=joined(pieces, calls), calls=tuple(calls), reasoning="\n".join(reasoning)
        )


def _messages(text: str) -> list[_Message]:
    """Return the messages of a reply. The header of the first began in the prompt."""
    messages: list[_Message] = []
    for segment in _BETWEEN.split(text):
        header, separator, body = segment.partition("<|message|>")
        if separator:
            messages.append(_Message(header, body))
        elif header.startswith("<|start|>") or _CHANNEL.search(header) or _TO.match(header):
            messages.append(_Message(header, None))
        elif header.strip():
            messages.append(_Message("", header))  # a plain text, outside the format
    return messages


def _read(message: _Message, recipient: str) -> ToolCall:
    name = recipient.removeprefix("functions.")
    if message.body is None:
        problem = MalformedCallError("the reply ends before <|message|>", name)
        return malformed(problem, _EXPECTED, raw=message.header)
    raw = f"{message.header}<|message|>{message.body}"
    return read_call(partial(call_of, name, message.body), _EXPECTED, raw=raw)
