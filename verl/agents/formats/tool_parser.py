"""verl's plug-in class for tool-call formats, and the adapters in both directions."""

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar

from verl.agents.formats.base import (
    OTHER_NAMES,
    MalformedCallError,
    ParsedReply,
    ToolCall,
    ToolFormat,
    ToolSchemas,
    known_as,
    read_call,
    tool_formats,
)
from verl.utils.errors import ConfigError
from verl.utils.logging import logger
from verl.utils.registry import Registry

P = TypeVar("P", bound="type[ToolParser]")


@dataclass
class FunctionCall:
    """A call in verl's API: `arguments` is a JSON text."""

    name: str
    arguments: str
    tool_call_id: str | None = None


class ToolParser(ABC):
    """Extracts calls from the ids of a reply. Subclass and register it to add a format.

    Examples:
        @ToolParser.register("mine")
        class MyParser(ToolParser):
            async def extract_tool_calls(self, responses_ids): ...
    """

    _parsers: ClassVar[Registry[type["ToolParser"]]] = Registry("tool parser")

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        """Return the content without the calls, and the calls. `tools` may be left out."""
        raise NotImplementedError

    @classmethod
    def register(cls, name: str) -> Callable[[P], P]:
        """Register a subclass under a name, which then takes precedence over a built-in format."""

        def add(parser: P) -> P:
            cls._parsers.register(name)(parser)
            return parser

        return add

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> "ToolParser":
        """Return a parser by name: a registered class, or a built-in format under this API.

        Raises ConfigError for an unknown name.
        """
        if name in cls._parsers:
            return cls._parsers.get(name)(tokenizer)
        return FormatParser(tokenizer, built_in(name))


class FormatParser(ToolParser):
    """A built-in format under verl's API. Leaves malformed calls out, as verl does."""

    def __init__(self, tokenizer: Any, tool_format: ToolFormat) -> None:
        super().__init__(tokenizer)
        self.tool_format = tool_format

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        """See `ToolParser.extract_tool_calls`."""
        text = decoded(self.tokenizer, responses_ids)
        reply = self.tool_format.parse(text, [_as_schema(tool) for tool in tools or ()])

        calls: list[FunctionCall] = []
        for call in reply.calls:
            if call.arguments is None:
                logger.debug("Leaving out a malformed tool call. %s", call.error)
                continue
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            calls.append(FunctionCall(call.name, arguments, call.call_id))
        return reply.content, calls


class ParserFormat:
    """A user's `ToolParser`, which reads the ids that were drawn.

    Calls with arguments that are no JSON object become malformed ones.
    """

    def __init__(self, parser: ToolParser) -> None:
        self.parser = parser
        parameters = inspect.signature(parser.extract_tool_calls).parameters
        self._takes_tools = len(parameters) > 1

    async def parse_ids(self, token_ids: Sequence[int], tools: ToolSchemas) -> ParsedReply:
        """Split a reply into text and calls. Errors of the user's class are raised."""
        if self._takes_tools:
            content, found = await self.parser.extract_tool_calls(list(token_ids), list(tools))
        else:
            content, found = await self.parser.extract_tool_calls(list(token_ids))
        return ParsedReply(content=content, calls=tuple(_as_call(call) for call in found))


CallFormat: TypeAlias = ToolFormat | ParserFormat


def tool_format(name: str, tokenizer: Any) -> CallFormat:
    """Return a format by its name: a user's registered `ToolParser`, or a built-in format.

    Raises ConfigError for an unknown name.
    """
    if name in ToolParser._parsers:
        return ParserFormat(ToolParser.get_tool_parser(name, tokenizer))
    return built_in(name)


async def parse_reply(
    tool_format: CallFormat, token_ids: Sequence[int], text: str, tools: ToolSchemas
) -> ParsedReply:
    """Split a reply into text and calls, whichever kind of format it is.

    Args:
        token_ids: the ids that were drawn, for a user's parser.
        text: the same with special tokens kept, for a built-in format.
    """
    if isinstance(tool_format, ParserFormat):
        return await tool_format.parse_ids(token_ids, tools)
    return tool_format.parse(text, tools)


def built_in(name: str) -> ToolFormat:
    """Return a format of the registry. Raises ConfigError for an unknown name."""
    own_name = OTHER_NAMES.get(name, name)
    if own_name in tool_formats:
        return tool_formats.get(own_name)()

    known = sorted({*tool_formats, *ToolParser._parsers})
    close = get_close_matches(name, [*known, *OTHER_NAMES], n=3, cutoff=0.5)
    nearest = f" Nearest: {', '.join(close)}." if close else ""
    raise ConfigError(
        f"rollout.multi_turn.format must be the name of a tool-call format, got '{name}'.{nearest} "
        f"Known: {', '.join(known)}. To add one, register a ToolParser."
    )


def decoded(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of ids with special tokens kept, since some of them are the tags of calls."""
    text: str = tokenizer.decode(
        list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def _as_schema(tool: Any) -> Mapping[str, Any]:
    """Return an OpenAI schema of a mapping or of a pydantic model."""
    if isinstance(tool, Mapping):
        return tool
    schema: Mapping[str, Any] = tool.model_dump()
    return schema


def _as_call(call: Any) -> ToolCall:
    raw = str(call.arguments)
    return read_call(partial(_read, call, raw), "arguments that are a JSON object", raw=raw)


def _read(call: Any, raw: str) -> ToolCall:
    with known_as(call.name):
        try:
            arguments = json.loads(raw)
        except ValueError as error:
            raise MalformedCallError(f"invalid JSON ({error})") from error
        if not isinstance(arguments, dict):
            raise MalformedCallError("the arguments are no object")
    call_id = getattr(call, "tool_call_id", None)
    return ToolCall(name=call.name, arguments=arguments, call_id=call_id)
