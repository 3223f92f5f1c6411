"""Between messages and tokens: the tokenizer, its chat template and the format of tool calls."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl.agents.boundary import ChatBoundary
from verl.agents.engine_client import Generated
from verl.agents.formats import CallFormat, ParsedReply, parse_reply
from verl.agents.formats.base import ToolSchemas
from verl.agents.gateway.errors import ApiError
from verl.data.chat import Message
from verl.rollout.types import Completion
from verl.utils.errors import VerlError

_BROKEN = "\ufffd"  # a character of which some bytes are missing
_CALL_ID_CHARACTERS = 9  # as the templates of Mistral's models demand


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One drawn reply.

    Args:
        prompt_ids: the tokens that it follows.
        token_ids: the tokens that were drawn, an end-of-turn token included.
        log_probs: one for each drawn token.
        finish_reason: "stop", "length", or "tool_calls".
        content: the text without special tokens, tool calls and stop string.
        tool_calls: in the shape of the API.
        reasoning: text of a channel of its own, for formats that have one.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str
    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """The reply as a message of the API."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = list(self.tool_calls)
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message


class Wording:
    """Turns requests into prompts, and drawn tokens into replies.

    Args:
        tokenizer: of the model.
        boundary: of its chat template.
        tool_format: of the model's tool calls. None: requests with tools are refused.
    """

    def __init__(
        self, tokenizer: Any, boundary: ChatBoundary, tool_format: CallFormat | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.boundary = boundary
        self.tool_format = tool_format

    def check_tools(self, tools: ToolSchemas) -> None:
        """Raise ApiError for tools, if no format of tool calls is known."""
        if tools and self.tool_format is None:
            raise ApiError(
                "This model's format of tool calls is not known, so `tools` cannot be offered to "
                "it. Leave them out, or name the format: multi_turn.format of the rollout in "
                "training, server.tool_format of `verl serve`.",
                field="tools",
            )

    def chat_prompt(self, messages: Sequence[Message], tools: ToolSchemas) -> list[int]:
        """Return the tokens of a conversation, ready for a reply."""
        try:
            return list(self.boundary.prompt(messages, list(tools) or None))
        except VerlError as error:
            raise ApiError(str(error), field="messages") from error

    def text_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the tokens of a plain prompt."""
        if isinstance(prompt, str):
            ids = self.tokenizer(prompt, verbose=False)["input_ids"]
            # Some tokenizers also end a text; a prompt must stay open.
            if len(ids) > 1 and ids[-1] == self.tokenizer.eos_token_id:
                ids = ids[:-1]
        else:
            ids = list(prompt)

        size = len(self.tokenizer)
        if not ids or min(ids) < 0 or max(ids) >= size:
            raise ApiError(
                f"prompt must have at least one token, with ids from 0 to {size - 1}.",
                field="prompt",
            )
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, special or not."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    async def reply(
        self,
        prompt_ids: Sequence[int],
        drawn: Generated | Completion,
        *,
        tools: ToolSchemas = (),
        stop: Sequence[str] = (),
        name: str = "",
    ) -> Reply:
        """Read a drawn reply.

        Args:
            prompt_ids: the tokens that it follows.
            drawn: the tokens of the reply.
            tools: that the model was offered.
            stop: texts that end a reply and are not part of it.
            name: of the reply. Ids of its tool calls are made from it.
        """
        if drawn.finish_reason == "abort":
            raise ApiError("The engine gave the request up. Try again later.", status=503)

        content = self.decode(drawn.token_ids)
        finish_reason = drawn.finish_reason
        calls: tuple[dict[str, Any], ...] = ()
        reasoning = ""
        if tools and self.tool_format is not None:
            text = self.boundary.text_of(drawn.token_ids)
            parsed = await parse_reply(self.tool_format, drawn.token_ids, text, tools)
            content, calls = read_calls(parsed, name)
            reasoning = parsed.reasoning
        if finish_reason == "stop":
            content = cut(content, stop)
            finish_reason = "tool_calls" if calls else "stop"

        return Reply(
            prompt_ids=prompt_ids,
            token_ids=drawn.token_ids,
            log_probs=drawn.log_probs,
            finish_reason=finish_reason,
            content=content,
            tool_calls=calls,
            reasoning=reasoning,
        )


def read_calls(parsed: ParsedReply, name: str) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Return the text and the tool calls of a parsed reply. A malformed call stays text."""
    content = parsed.content
    calls = []
    for number, call in enumerate(parsed.calls):
        if call.arguments is None:
            content += call.raw
            continue
        call_id = call.call_id or _call_id(f"{name}/{number}")
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
    return content, tuple(calls)


class TextStream:
    """The text of one reply, piece by piece as its tokens are drawn.

    A piece never ends within a character, nor within a text that may become a stop string.
    """

    def __init__(self, wording: Wording, stop: Sequence[str] = ()) -> None:
        self._wording = wording
        self._stop = stop
        self._held_back = max((len(text) for text in stop), default=1) - 1
        self._ids: list[int] = []
        # Tokens before `_begin` are not decoded again; the text of those before `_end` is taken.
        self._begin = 0
        self._end = 0
        self._text = ""
        self._sent = 0  # characters

    def push(self, token_ids: Sequence[int]) -> str:
        """Add drawn tokens. Return the text that is certain by now and was not returned yet."""
        self._ids += token_ids
        known = self._wording.decode(self._ids[self._begin : self._end])
        text = self._wording.decode(self._ids[self._begin :])
        if len(text) > len(known) and not text.endswith(_BROKEN):
            self._text += text[len(known) :]
            self._begin = self._end
            self._end = len(self._ids)
        return self._take(len(self._text) - self._held_back)

    def finish(self, content: str) -> str:
        """Return the rest of the text, of which `content` is the whole."""
        sent = self._text[: self._sent]
        if content.startswith(sent):
            return content[len(sent) :]
        # The decoder changed an earlier character; the pieces stay as they were sent.
        return cut(self._text, self._stop)[self._sent :]

    def _take(self, end: int) -> str:
        end = min(end, len(cut(self._text, self._stop)))
        if end <= self._sent:
            return ""
        piece = self._text[self._sent : end]
        self._sent = end
        return piece


def cut(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    places = [text.find(stop) for stop in stops]
    return text[: min((place for place in places if place >= 0), default=len(text))]


def _call_id(name: str) -> str:
    """Return an id of a tool call. It is the same in every run, because templates may show it."""
    return hashlib.blake2b(name.encode(), digest_size=16).hexdigest()[:_CALL_ID_CHARACTERS]
