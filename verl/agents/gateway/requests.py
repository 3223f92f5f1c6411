"""Read requests of OpenAI's API.

A field that would change the answer is honored or refused. A lenient reader ignores it instead.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from verl.agents.gateway.errors import ApiError
from verl.data.chat import Message, Messages, as_messages
from verl.utils.errors import DataError
from verl.utils.json_text import parse_json, parse_object
from verl.utils.logging import say_once

MAX_CHOICES = 128

# Fields without an effect on the answer.
_INERT = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
# Fields with an effect that no engine here has: accepted with a value that asks for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}


@dataclass(frozen=True, kw_only=True)
class DrawSettings:
    """Settings of the draw that a request names. None: the server's own."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    n: int = 1


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Settings of the form in which a request wants its answer."""

    stream: bool = False
    include_usage: bool = False  # in a last chunk of the stream
    log_probs: bool = False
    token_ids: bool = False


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """POST /v1/chat/completions. Messages are in the shape that chat templates read."""

    model: str | None
    messages: Messages
    tools: list[dict[str, Any]]
    draw: DrawSettings
    output: OutputSettings

    @classmethod
    def read(cls, body: bytes, *, lenient: bool = False) -> "ChatRequest":
        """Raise ApiError for a request that is malformed or asks for more than the server has."""
        fields = Fields(body, lenient=lenient)
        messages = _messages(fields.get("messages"))
        tools = _tools(fields)
        limit = fields.whole("max_completion_tokens", at_least=1)
        older_limit = fields.whole("max_tokens", at_least=1)

        request = cls(
            model=fields.text("model"),
            messages=messages,
            tools=tools,
            draw=_draw_settings(fields, older_limit if limit is None else limit),
            output=_output_settings(fields, log_probs=fields.flag("logprobs")),
        )
        fields.refuse_others()
        return request


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """POST /v1/completions. Each prompt is a text or a list of token ids."""

    model: str | None
    prompts: list[str | list[int]]
    draw: DrawSettings
    output: OutputSettings
    tools: ClassVar[tuple[()]] = ()  # none can be offered

    @classmethod
    def read(cls, body: bytes, *, lenient: bool = False) -> "CompletionRequest":
        """Raise ApiError for a request that is malformed or asks for more than the server has."""
        fields = Fields(body, lenient=lenient)
        prompts = _prompts(fields.get("prompt"))
        log_probs = fields.get("logprobs")
        is_flag = log_probs is None or isinstance(log_probs, bool)
        if not is_flag and log_probs != 0:
            raise ApiError(
                f"logprobs must be 0, got {log_probs!r}: the log-probs of other tokens than the "
                "chosen one are not kept.",
                field="logprobs",
            )

        request = cls(
            model=fields.text("model"),
            prompts=prompts,
            draw=_draw_settings(fields, fields.whole("max_tokens", at_least=1)),
            output=_output_settings(fields, log_probs=bool(log_probs) or not is_flag),
        )
        fields.refuse_others()
        return request


class Fields:
    """The fields of a request. Every one must be read, or be without an effect.

    Args:
        body: of the request.
        lenient: whether to ignore fields with an effect that the server does not have.
    """

    def __init__(self, body: bytes, *, lenient: bool = False) -> None:
        self.lenient = lenient
        try:
            self._values = parse_object(body)
        except ValueError as error:
            raise ApiError(f"The body must be a JSON object: {error}.") from error
        self._known = {*_INERT, *_NEUTRAL}

    def get(self, name: str) -> Any:
        """Return the value of a field; None where it is absent or null."""
        self._known.add(name)
        return self._values.get(name)

    def flag(self, name: str) -> bool:
        """Return a boolean field, by default False."""
        return bool(self.of_kind(name, bool, "true or false"))

    def text(self, name: str) -> str | None:
        """Return a text, or None."""
        return self.of_kind(name, str, "a text")

    def of_kind(self, name: str, kind: Any, expected: str) -> Any:
        """Return a value of a class, or None. A boolean is no number."""
        value = self.get(name)
        if value is None:
            return None
        is_boolean = isinstance(value, bool)
        if not isinstance(value, kind) or is_boolean != (kind is bool):
            raise _wrong(name, expected, value)
        return value

    def number(
        self, name: str, *, at_least: float = -math.inf, at_most: float = math.inf
    ) -> float | None:
        """Return a number within its range, or None."""
        expected = f"a number from {at_least:g} to {at_most:g}"
        value = self._within(name, (int, float), at_least, at_most, expected)
        return None if value is None else float(value)

    def whole(self, name: str, *, at_least: int, at_most: int = 2**63 - 1) -> int | None:
        """Return a whole number within its range, or None."""
        expected = f"a whole number from {at_least} to {at_most}"
        return self._within(name, int, at_least, at_most, expected)

    def _within(self, name: str, kind: Any, at_least: float, at_most: float, expected: str) -> Any:
        value = self.of_kind(name, kind, expected)
        if value is not None and not at_least <= value <= at_most:
            raise _wrong(name, expected, value)
        return value

    def refuse_others(self) -> None:
        """Raise ApiError for a field that was not read, or that asks for an effect it lacks."""
        for name, value in self._values.items():
            if value is None or self.lenient:
                continue
            if name not in self._known:
                raise ApiError(
                    f"The field '{name}' is not supported by this server. Leave it out.",
                    field=name,
                )

            neutral = _NEUTRAL.get(name)
            if neutral is not None and value not in neutral:
                accepted = f"only {neutral[0]!r} is accepted" if neutral else "it is not supported"
                raise ApiError(
                    f"{name}={value!r} would change the answer, and {accepted} here. Leave it out.",
                    field=name,
                )


def _draw_settings(fields: Fields, max_tokens: int | None) -> DrawSettings:
    top_k = fields.whole("top_k", at_least=-1)
    n = fields.whole("n", at_least=1, at_most=MAX_CHOICES)
    return DrawSettings(
        temperature=fields.number("temperature", at_least=0, at_most=100),
        top_p=fields.number("top_p", at_least=1e-9, at_most=1),
        top_k=-1 if top_k == 0 else top_k,
        min_p=fields.number("min_p", at_least=0, at_most=1),
        stop=_stops(fields.get("stop")),
        seed=fields.whole("seed", at_least=-(2**63)),
        max_tokens=max_tokens,
        n=1 if n is None else n,
    )


def _output_settings(fields: Fields, *, log_probs: bool) -> OutputSettings:
    options = fields.of_kind("stream_options", dict, "an object") or {}
    return OutputSettings(
        stream=fields.flag("stream"),
        include_usage=bool(options.get("include_usage")),
        log_probs=log_probs,
        token_ids=fields.flag("return_token_ids"),
    )


def _stops(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not _is_list_of(texts, str) or "" in texts:
        raise _wrong("stop", "a text or a list of texts, none of them empty", value)
    return tuple(texts)


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_list_of(value, int):
            return [value]
        are_ids = all(each and _is_list_of(each, int) for each in value)
        if are_ids or _is_list_of(value, str):
            return value
    raise _wrong("prompt", "a text, a list of token ids, or a list of either", value)


def _is_list_of(value: Any, kind: type) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(each, kind) and not isinstance(each, bool) for each in value)


def _tools(fields: Fields) -> list[dict[str, Any]]:
    """Return the tools that the model is offered, in the shape of chat templates."""
    tools = fields.get("tools") or []
    for tool in tools if isinstance(tools, list) else [tools]:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong("tools", "a list of {type: function, function: {name: ...}}", tool)

    choice = fields.get("tool_choice")
    if choice == "none":
        return []
    if choice == "required":
        # Clients such as smolagents always ask for it, and handle a reply without a call. Forcing
        # the tokens of a call would draw from another distribution than the policy's.
        say_once(
            "A client asks for tool_choice='required'. The model is offered the tools, but the "
            "draw is not constrained: a reply may lack a call.",
            logging.WARNING,
        )
    elif choice not in (None, "auto") and not fields.lenient:
        raise ApiError(
            f"tool_choice must be 'auto', 'required' or 'none', got {choice!r}: the draw is not "
            "constrained. Offer that tool alone.",
            field="tool_choice",
        )
    return tools


def _messages(value: Any) -> Messages:
    if not isinstance(value, list) or not value:
        raise _wrong("messages", "a list with at least one message", value)
    plain = [template_message(message) for message in value if isinstance(message, dict)]
    if len(plain) != len(value):
        raise _wrong("messages", "a list of objects with role and content", value)
    _refuse_media(plain)
    try:
        return as_messages(plain)
    except DataError as error:
        raise ApiError(f"messages: {error}", field="messages") from error


def _refuse_media(messages: Messages) -> None:
    """Raise ApiError for a part that is no text. The server has no reader of pictures."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind != "text":
                raise ApiError(
                    f"messages: message {number} has a part of type '{kind}'. This server takes "
                    "text alone, also for models that read pictures. Send text parts; training "
                    "and `verl generate` read pictures.",
                    field="messages",
                )


def template_message(message: Mapping[str, Any]) -> Message:
    """Return a message of the API in the shape that chat templates read.

    Arguments of tool calls become objects, nulls are left out, and an assistant's missing content
    becomes an empty text.
    """
    plain = {name: value for name, value in message.items() if value is not None}
    if plain.get("role") == "developer":
        plain["role"] = "system"
    if plain.get("role") != "assistant":
        return plain

    plain.setdefault("content", "")
    calls = plain.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise _wrong("tool_calls", "a list of calls", calls)
        plain["tool_calls"] = [_template_call(call) for call in calls]
    return plain


def _template_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise _wrong("tool_calls", "objects with a function and its name", call)
    arguments = _arguments(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(value: Any) -> Any:
    """Return the object that a text of JSON stands for. Other text stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value


def canonical(message: Mapping[str, Any]) -> Message:
    """Return the parts of a template message that decide whether two messages are the same.

    Clients drop ids, reasoning and empty fields, and strip the text of a reply, when they send it
    back.
    """
    if message.get("role") != "assistant":
        return dict(message)
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        calls.append([function["name"], function.get("arguments")])

    same: dict[str, Any] = {"role": "assistant", "content": str(message["content"]).strip()}
    if calls:
        same["tool_calls"] = calls
    return same


def _wrong(name: str, expected: str, value: Any) -> ApiError:
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:80]}..."
    return ApiError(f"{name} must be {expected}, got {shown}.", field=name)
