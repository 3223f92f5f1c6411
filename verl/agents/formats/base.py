"""The contract of a tool-call format, and the helpers that its implementations share."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn, Protocol

from verl.utils.registry import Registry

# Tokens that end a turn in the families known here, and tokens of the next role that do so where a
# template writes no other. A reply may end with one of them.
TURN_ENDS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<turn|>",
    "<｜end▁of▁sentence｜>",
    "<seed:eos>",
    "[e~[",
    "[EOS]",
)
NEXT_ROLES = ("<|user|>", "<|observation|>", "<|tool_response>", "<start_function_response>")
THINK = ("<think>", "</think>")
ToolSchemas = Sequence[Mapping[str, Any]]  # tools that a model is offered, as OpenAI describes them

_SPACE = re.compile(r"\s*")
_LONGEST = 200  # characters of a problem, of a name
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,128})"')


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call that a model wrote.

    `arguments` is None where the call is malformed; then `error` is one sentence for the model.
    `raw` is the text of the call. `call_id` is the id that the model gave it, if its format has
    ids.
    """

    name: str
    arguments: dict[str, Any] | None
    error: str | None = None
    raw: str = ""
    call_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class ParsedReply:
    """A reply, split into its text and its calls.

    `content` is the text without the calls, with <think> blocks. `calls` are in order, malformed
    ones included. `reasoning` is the text of a reasoning channel that the format separates itself.
    """

    content: str
    calls: tuple[ToolCall, ...]
    reasoning: str = ""


class ToolFormat(Protocol):
    """Finds the tool calls in the text of a reply."""

    def parse(self, text: str, tools: ToolSchemas) -> ParsedReply:
        """Split a reply into text and calls. Never raises for any text.

        `text` is decoded with special tokens kept; the token that ends the turn may be missing.
        `tools` are OpenAI schemas, which give the types of arguments that are written as text.
        Where the prompt ends with an opened <think>, a reply that was cut within it needs that tag
        in front, since the text alone does not show it.
        """
        ...


tool_formats: Registry[Callable[[], ToolFormat]] = Registry("tool-call format")

# Names of formats in later versions of verl, and of the same parsers in vLLM and SGLang.
OTHER_NAMES = {
    "deepseek_v3": "deepseek",
    "deepseek_v31": "deepseek",
    "deepseek_v32": "deepseek",
    "deepseek_v4": "deepseek",
    "functiongemma": "gemma",
    "gemma4": "gemma",
    "glm45": "glm",
    "glm47": "glm",
    "gpt_oss": "gpt-oss",
    "kimi_k2": "kimi",
    "minimax_m2": "minimax",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "seed_oss": "seed",
}


class MalformedCallError(ValueError):
    """A call breaks its format; the message describes where. Never leaves this package.

    `name` and `call_id` are those of the call, as far as they are known.
    """

    def __init__(self, problem: str, name: str = "") -> None:
        super().__init__(problem)
        self.name = name
        self.call_id: str | None = None  # noted by `known_as`


# ---------------------------------------------------------------- calls


def new_call_id(turn: int, number: int) -> str:
    """Return an id for a call that the model gave none.

    It has nine digits, which Mistral's templates demand, and depends on nothing but its place.
    """
    return f"{turn % 100_000:05d}{number % 10_000:04d}"


def malformed(problem: MalformedCallError, expected: str, *, raw: str) -> ToolCall:
    """Return a call without arguments, with an error that names the problem and the right form.

    A reply may hold names of any length, which are shortened.
    """
    error = f"The tool call could not be read: {str(problem)[:_LONGEST]}. Expected {expected}."
    name = problem.name[:_LONGEST]
    return ToolCall(name=name, arguments=None, error=error, raw=raw, call_id=problem.call_id)


def read_call(read: Callable[[], ToolCall], expected: str, *, raw: str) -> ToolCall:
    """Return the call that `read` returns, or a malformed one for its MalformedCallError."""
    try:
        return replace(read(), raw=raw)
    except MalformedCallError as problem:
        return malformed(problem, expected, raw=raw)


@contextmanager
def known_as(name: str, call_id: str | None = None) -> Iterator[None]:
    """Note name and id of a call in a MalformedCallError that is raised within."""
    try:
        yield
    except MalformedCallError as problem:
        problem.name = name
        problem.call_id = call_id
        raise


def call_from(value: Any, keys: Sequence[str] = ("arguments",)) -> ToolCall:
    """Return the call that a JSON value describes; `keys` may hold its arguments.

    Raises MalformedCallError.
    """
    if not isinstance(value, dict):
        raise MalformedCallError("it is not a JSON object")

    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        raise MalformedCallError("the key 'name' must be the name of a tool")

    name = name.strip()
    key = next((each for each in keys if each in value), keys[0])
    if not isinstance(value.get(key), dict):
        raise MalformedCallError(f"the key '{key}' must be a JSON object", name)
    call_id = value.get("id")
    if not isinstance(call_id, str):
        call_id = None
    return ToolCall(name=name, arguments=value[key], call_id=call_id)


def call_of(name: str, arguments: str) -> ToolCall:
    """Return the call of `name` with arguments that are a JSON text. Raises MalformedCallError."""
    if not name:
        raise MalformedCallError("the name of the tool is missing")
    with known_as(name):
        values = read_json(arguments)
        if not isinstance(values, dict):
            raise MalformedCallError("the arguments must be a JSON object")
    return ToolCall(name=name, arguments=values)


def name_within(text: str) -> str:
    """Return the name that a broken JSON text gives, or an empty text."""
    found = _NAME.search(text)
    return found[1] if found else ""


# ---------------------------------------------------------------- JSON


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raises MalformedCallError."""
    value, end = read_json_at(text, 0)
    if text[end:].strip():
        raise MalformedCallError(f"unexpected text follows the JSON at character {end}")
    return value


def read_json_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `start`, after white space, and the place of its end.

    Raises MalformedCallError.
    """
    start = after_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        place = error.pos - start
        raise MalformedCallError(f"invalid JSON ({error.msg} at character {place})") from error
    except RecursionError as error:
        raise MalformedCallError("the JSON is nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits, or NaN
        raise MalformedCallError("the JSON holds a number that cannot be read") from error

    # Escapes may write half a character, which no tokenizer and no tool can take.
    if "\\ud" in text[start:end].lower() and not _is_unicode(value):
        raise MalformedCallError("the JSON holds half of a surrogate pair")
    return value, end


def after_space(text: str, start: int) -> int:
    """Return the place of the first character at or after `start` that is no white space."""
    space = _SPACE.match(text, start)
    return space.end() if space else start


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


# ---------------------------------------------------------------- text


def without_end(text: str, extra: Sequence[str] = ()) -> str:
    """Return the text without the token that ends its turn, if it has one."""
    stripped = text.rstrip()
    for token in (*TURN_ENDS, *NEXT_ROLES, *extra):
        if stripped.endswith(token):
            return stripped[: -len(token)]
    return text


def joined(pieces: Sequence[str], calls: Sequence[ToolCall]) -> str:
    """Return the content of a reply. Next to calls, white space at its ends is layout."""
    content = "".join(pieces)
    return content.strip() if calls else content


def parse_after_reasoning(
    text: str, parse: Callable[[str, int], ParsedReply], tags: tuple[str, str] = THINK
) -> ParsedReply:
    """Parse a reply from the end of its leading reasoning on; `parse(text, start)` does the rest.

    The prompt may have opened the reasoning, so a closing tag alone ends it, too, except where it
    stands within a well-formed call.
    """
    opening, closing = tags
    found = text.find(closing)
    if text.lstrip().startswith(opening):
        start = found + len(closing) if found >= 0 else len(text)
        return parse(text, start)

    reply = parse(text, 0)
    is_quoted = any(call.arguments is not None and closing in call.raw for call in reply.calls)
    if found < 0 or is_quoted:
        return reply
    return parse(text, found + len(closing))


@dataclass(frozen=True, kw_only=True)
class CallTags:
    """How a format marks its calls.

    `wrappers` surround a group of calls and are no content. `json_body` marks bodies that are JSON
    from the first to the last character, so that a string in them may hold the closing tag.
    """

    opening: str
    closing: str
    expected: str
    wrappers: tuple[str, ...] = ()
    reasoning: tuple[str, str] = THINK
    json_body: bool = False


class TaggedFormat(ABC):
    """A `ToolFormat` with calls between `tags`."""

    tags: CallTags

    def parse(self, text: str, tools: ToolSchemas) -> ParsedReply:
        """See `ToolFormat.parse`."""
        return parse_tagged(text, self.tags, partial(self.read, tools=tools))

    @abstractmethod
    def read(self, body: str, tools: ToolSchemas) -> ToolCall:
        """Return the call with `body` between its tags. Raises MalformedCallError."""


def parse_tagged(text: str, tags: CallTags, read: Callable[[str], ToolCall]) -> ParsedReply:
    """Split a reply that has its calls between tags; `read(body)` reads one of them.

    `read` raises MalformedCallError for a call that it cannot read.

    Takes time linear in the text: each step continues behind the text that it consumed.
    """
    scan = _TagScan(without_end(text), tags, read)
    scan.run()

    pieces = scan.pieces
    for wrapper in tags.wrappers:
        pieces = [piece.replace(wrapper, "") for piece in pieces]
    return ParsedReply(content=joined(pieces, scan.calls), calls=tuple(scan.calls))


class _TagScan:
    """Walks over a reply from tag to tag."""

    def __init__(self, text: str, tags: CallTags, read: Callable[[str], ToolCall]) -> None:
        self.pieces: list[str] = []
        self.calls: list[ToolCall] = []
        self._text = text
        self._tags = tags
        self._read = read
        self._position = 0
        # The prompt may have opened the reasoning. Only the first closing tag can end that.
        self._may_be_reasoning = True
        # A decode beyond the next closing tag that fails costs the rest of the text, so one is
        # allowed in a reply.
        self._may_look_further = tags.json_body

    def run(self) -> None:
        """Collect the pieces of text and the calls."""
        thinks, thought = self._tags.reasoning
        literals = (self._tags.opening, thinks, thought)
        marks = re.compile("|".join(re.escape(literal) for literal in literals))

        while found := marks.search(self._text, self._position):
            if found[0] == self._tags.opening:
                self._take_call(found)
            elif found[0] == thinks:
                self._may_be_reasoning = False
                end = self._text.find(thought, found.end())
                stop = end + len(thought) if end >= 0 else len(self._text)
                self._take_text(stop)
            elif self._may_be_reasoning:
                self._end_reasoning(found.end())
            else:
                self._take_text(found.end())
        self._take_text(len(self._text))

    def _take_text(self, end: int) -> None:
        self.pieces.append(self._text[self._position : end])
        self._position = end

    def _end_reasoning(self, end: int) -> None:
        """Turn everything before `end` into reasoning, which holds no calls."""
        self.pieces = [self._text[:end]]
        self.calls = []
        self._position = end
        self._may_be_reasoning = False

    def _take_call(self, opened: re.Match[str]) -> None:
        text = self._text
        tags = self._tags
        close = text.find(tags.closing, opened.end())
        if close < 0:
            close = end = len(text)
            raw = text[opened.start() :]
            name = name_within(raw) if tags.json_body else ""
            problem = MalformedCallError(f"the reply ends before {tags.closing}", name)
            call = malformed(problem, tags.expected, raw=raw)
        else:
            call, end = self._call_up_to(close, opened)

        if call.arguments is None and self._may_look_further:
            further = self._json_end(opened.end())
            if further is not None:
                call, end = self._call_up_to(further, opened)

        # A tag that reasoning merely mentions: the reasoning ends behind it.
        if call.arguments is None and self._may_be_reasoning:
            thought = text.find(tags.reasoning[1], opened.end(), close)
            if thought >= 0:
                self._end_reasoning(thought + len(tags.reasoning[1]))
                return

        self._take_text(opened.start())
        self._position = end
        self.calls.append(call)

    def _call_up_to(self, close: int, opened: re.Match[str]) -> tuple[ToolCall, int]:
        """Return the call whose closing tag begins at `close`, and where it ends."""
        end = close + len(self._tags.closing)
        read = partial(self._read, self._text[opened.end() : close])
        raw = self._text[opened.start() : end]
        return read_call(read, self._tags.expected, raw=raw), end

    def _json_end(self, start: int) -> int | None:
        """Return where the closing tag behind a JSON value begins, if one follows."""
        try:
            _, end = read_json_at(self._text, start)
        except MalformedCallError:
            self._may_look_further = False
            return None

        close = after_space(self._text, end)
        return close if self._text.startswith(self._tags.closing, close) else None
