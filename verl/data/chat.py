"""Turn chat messages into prompt token ids."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from verl.utils.errors import DataError
from verl.utils.json_text import parse_json, parse_object
from verl.utils.logging import say_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Messages = list[Message]

# Roles that all chat templates render. A template may support others; see `check_roles`.
USUAL_ROLES = ("system", "user", "assistant", "tool")
_MEDIA = ("image", "image_url", "video", "video_url", "audio", "input_audio", "audio_url")
_PROBE = "verl-content-of-this-message"  # a content to search for in a rendered template


def as_messages(value: Any) -> Messages:
    """Return a prompt as messages with text contents. Raises DataError if it is no prompt.

    A plain string becomes one message of the user (logged once). Several text parts of a content
    are joined, because many templates would print the Python list instead.
    """
    if isinstance(value, str):
        _check_no_json(value)
        say_once("A prompt that is a plain string is treated as one message of the user.")
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(
            "must be a list of messages such as [{'role': 'user', 'content': 'Hi'}], or a string, "
            f"got {type(value).__name__}: {str(value)[:80]!r}{way_to_convert(value)}"
        )
    return [_as_message(number, message) for number, message in enumerate(value)]


def _check_no_json(text: str) -> None:
    """Raise DataError for a chat that was written into its column as JSON."""
    if not text.lstrip().startswith("[{"):
        return
    value = _parsed(text)
    if value is not None and isinstance(value[0], dict) and {"role", "content"} <= value[0].keys():
        raise DataError(
            "must be a list of messages, got the JSON text of one, which the model would read as "
            f"it stands: {text[:80]!r}. Apply json.loads to the column"
        )


def way_to_convert(value: Any) -> str:
    """Return how to convert a column whose values were written as bytes or as JSON; "" if it has
    others. The text goes to the end of a message that names the value."""
    if isinstance(value, bytes):
        return ". Decode it: column.map(bytes.decode)"
    if not isinstance(value, str) or _parsed(value) is None:
        return ""
    return ". Apply json.loads to the column"


def _parsed(text: str) -> Any:
    """Return the JSON list or object that is the whole text; None for another text."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return parse_json(text)
    except ValueError:
        return None


def _as_message(number: int, message: Any) -> Message:
    if not isinstance(message, dict):
        raise DataError(
            f"message {number} must be a dict with role and content, got {type(message).__name__}"
        )

    role = message.get("role")
    content = message.get("content")
    if not isinstance(role, str) or not role:
        raise DataError(
            f"message {number} lacks its role (system, user, assistant ...): {str(message)[:80]}"
        )

    # An assistant's turn that only calls tools has the content null.
    if content is None and message.get("tool_calls"):
        return message
    if isinstance(content, list):
        texts = [_text_of_part(number, part) for part in content]
        content = "".join(texts)
        message = {**message, "content": content}

    if not isinstance(content, str):
        raise DataError(
            f"message {number} lacks its content (a text): {str(message)[:80]}"
            f"{way_to_convert(content)}"
        )
    check_text(content, f"message {number} ")
    return message


def _text_of_part(number: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise DataError(
            f"message {number} must have parts that are dicts, got {type(part).__name__}: "
            f"{str(part)[:80]!r}"
        )

    # Arrow gives each part the keys of all parts, with null where a part has none.
    given = [name for name in _MEDIA if part.get(name) is not None]
    kind = part.get("type") or next(iter(given), "text")
    if kind != "text" or given:
        raise DataError(
            f"message {number} has a part of type '{kind}', which this model does not read. Leave "
            "the row out, or keep only its text parts"
        )

    text = part.get("text")
    if not isinstance(text, str):
        raise DataError(f"message {number} has a text part without its text: {str(part)[:80]}")
    return text


def check_text(text: str, name: str = "") -> None:
    """Raise DataError for a text that no tokenizer accepts; `name` begins the message."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name}must be text that can be written as UTF-8, got half a character (a lone "
            f"surrogate, {text[error.start]!r}) at place {error.start}: {text[:80]!r}. Write the "
            "whole character, or remove it"
        ) from error


def plain_text(messages: Messages, *, add_generation_prompt: bool = True) -> str:
    """Return the text of a conversation for a tokenizer without a chat template.

    The text of a single message is its content, because base models continue text. Several messages
    become lines of `role: content`, and the line `assistant:` opens the answer.
    """
    if len(messages) == 1:
        return str(messages[0]["content"])

    lines = [f"{message['role']}: {message['content']}" for message in messages]
    if add_generation_prompt:
        lines.append("assistant:")
    return "\n".join(lines)


def encode_conversations(
    tokenizer: "PreTrainedTokenizerBase",
    conversations: Sequence[Messages],
    *,
    add_generation_prompt: bool = True,
    template_key: str = "data.custom_chat_template",
) -> list[list[int]]:
    """Return the token ids of each conversation, up to where an answer begins.

    The tokenizer's template writes every special token itself. Without a template the text is
    `plain_text`, and the tokenizer adds its usual tokens at the beginning. Messages name
    `template_key` as the place to set another template. Raises DataError if a template refuses a
    conversation.
    """
    templated = tokenizer.chat_template is not None
    if not templated:
        say_once(
            "The tokenizer has no chat template: a single message is encoded as plain text, "
            f"several as lines of 'role: content'. Set {template_key} for another form."
        )

    texts = [
        render_conversation(
            tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            template_key=template_key,
        )
        for messages in conversations
    ]
    return encode_rendered(tokenizer, texts)


def encode_rendered(tokenizer: "PreTrainedTokenizerBase", texts: list[str]) -> list[list[int]]:
    """Return the token ids of texts of `render_conversation`, each left open."""
    if not texts:
        return []
    templated = tokenizer.chat_template is not None

    # verbose=False: the tokenizer must not warn about long prompts; the limit of the run decides.
    encoded: Any = tokenizer(
        texts, add_special_tokens=not templated, return_attention_mask=False, verbose=False
    )
    ids: list[list[int]] = encoded["input_ids"]
    if templated:
        return ids

    # Some tokenizers also add an end token, which a prompt must not have.
    for row in ids:
        if len(row) > 1 and row[-1] == tokenizer.eos_token_id:
            row.pop()
    return ids


def apply_chat_template(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, *, add_generation_prompt: bool = True
) -> list[int]:
    """Return the token ids of one conversation; see `encode_conversations`."""
    (ids,) = encode_conversations(
        tokenizer, [messages], add_generation_prompt=add_generation_prompt
    )
    return ids


def render_conversation(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_key: str = "data.custom_chat_template",
) -> str:
    """Return the text of a conversation by the tokenizer's template, or else `plain_text`.

    `tools` are OpenAI schemas. Raises DataError, which names `template_key` as the place to set
    another template, where the template refuses the messages.
    """
    if tokenizer.chat_template is None:
        return plain_text(messages, add_generation_prompt=add_generation_prompt)
    render = partial(
        render_by_template,
        tokenizer,
        add_generation_prompt=add_generation_prompt,
        tools=list(tools) if tools else None,
    )
    with template_errors(messages, template_key):
        if any(message.get("content") for message in messages):
            _require_contents(tokenizer, template_key)
        check_roles(messages, render)
        return render(messages)


def render_by_template(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    *,
    add_generation_prompt: bool = False,
    **arguments: Any,
) -> str:
    """Return the text of messages by the tokenizer's template.

    Args:
        add_generation_prompt: adds the text that the template puts before an answer.
        arguments: of the template, such as `tools`.
    """
    text: Any = tokenizer.apply_chat_template(
        as_template_reads(tokenizer, messages),
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **arguments,
    )
    return text


def as_template_reads(tokenizer: "PreTrainedTokenizerBase", messages: Messages) -> Messages:
    """Return messages with contents and calls of tools in the form that the template writes.

    Templates of SmolVLM and LLaVA-OneVision walk over a list of parts, and write nothing of a
    content that is a text. For these a text becomes a list of one part. Arguments of a call, given
    as an object or as JSON text, become the one that the template writes.
    """
    changed = []
    for message in _with_contents(tokenizer, messages):
        if message.get("tool_calls"):
            message = _with_arguments(message, as_text=_reads_text_arguments(tokenizer))
        changed.append(message)
    return changed


def _with_contents(tokenizer: "PreTrainedTokenizerBase", messages: Messages) -> Messages:
    if not _reads_parts_alone(tokenizer):
        return messages
    changed = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        changed.append(message)
    return changed


_parts_alone: dict[str, bool] = {}  # by the text of the template


def _reads_parts_alone(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether the template leaves out a content that is a text, and writes its parts."""
    template = str(tokenizer.chat_template)
    if template not in _parts_alone:
        parts = [{"type": "text", "text": _PROBE}]
        _parts_alone[template] = not _writes(tokenizer, _PROBE) and _writes(tokenizer, parts)
    return _parts_alone[template]


def _writes(tokenizer: "PreTrainedTokenizerBase", content: Any) -> bool:
    """Return whether the template writes the probe that a message of the user contains."""
    written = _written(tokenizer, [{"role": "user", "content": content}])
    return written is not None and _PROBE in written


def _written(tokenizer: "PreTrainedTokenizerBase", messages: Messages) -> str | None:
    """Return the text that the template writes, of messages as they are; None if it refuses them."""
    try:
        text: Any = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, TypeError):
        return None
    return text


_constant_texts: dict[str, str | None] = {}  # by the text of the template


def _require_contents(tokenizer: "PreTrainedTokenizerBase", key: str) -> None:
    """Raise DataError if the template writes the same text for all contents.

    Jinja writes nothing for a misspelled name, such as `message.contents`, so every prompt would
    be the same. `key` sets another template.
    """
    template = str(tokenizer.chat_template)
    if template not in _constant_texts:
        _constant_texts[template] = _constant_text(tokenizer)

    text = _constant_texts[template]
    if text is not None:
        raise DataError(
            "the chat template must write the content of each message, but it writes the same "
            f"text for all contents: {text[:80]!r}. Correct the names in it (message['content']), "
            f"or set {key} to another one"
        )


def _constant_text(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the text that the template writes for two contents; None if they differ."""
    texts = []
    for content in (_PROBE, f"another {_PROBE}"):
        messages = _with_contents(tokenizer, [{"role": "user", "content": content}])
        texts.append(_written(tokenizer, messages))
    return texts[0] if texts[0] == texts[1] else None


_text_arguments: dict[str, bool] = {}  # by the text of the template


def _reads_text_arguments(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether the template writes arguments that are JSON texts, and no objects."""
    template = str(tokenizer.chat_template)
    if template not in _text_arguments:
        written = _written_call(tokenizer, as_text=False)
        # Python's own notation of a dict is the sign of a template that expected a text.
        is_wrong = written is None or ("{'key'" in written and f"'{_PROBE}'" in written)
        _text_arguments[template] = is_wrong and _written_call(tokenizer, as_text=True) is not None
    return _text_arguments[template]


def _written_call(tokenizer: "PreTrainedTokenizerBase", *, as_text: bool) -> str | None:
    """Return the text of a conversation with a call; None if the template refuses it."""
    function = {"name": "verl_probe", "arguments": {"key": _PROBE}}
    call = {"id": "call00000", "type": "function", "function": function}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    conversation = [{"role": "user", "content": "Hi"}, _with_arguments(reply, as_text=as_text)]
    return _written(tokenizer, _with_contents(tokenizer, conversation))


def _with_arguments(message: Message, *, as_text: bool) -> Message:
    """Return the message with the arguments of its calls as JSON texts, or as objects."""
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return message  # the template refuses it, or writes a form of its own

        if "arguments" in function:
            arguments = function["arguments"]
            if as_text and not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            elif not as_text and isinstance(arguments, str):
                arguments = _as_object(arguments)
            function = {**function, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _as_object(text: str) -> Any:
    """Return the object of a JSON text; the text itself if it is none."""
    try:
        return parse_object(text)
    except ValueError:
        return text


def check_roles(messages: Messages, render: Callable[[Messages], str]) -> None:
    """Raise DataError for a message that the template leaves out because of its role.

    Only unusual roles are checked: the message is rendered with a probe as its content, which must
    appear in the text.
    """
    for number, message in enumerate(messages):
        if message["role"] in USUAL_ROLES:
            continue
        probed = [*messages]
        probed[number] = {**message, "content": _PROBE}
        if _PROBE not in render(probed):
            raise DataError(
                f"message {number} has the role '{message['role']}', whose messages the chat "
                f"template leaves out. Expected one of {', '.join(USUAL_ROLES)}, or another "
                "that the template writes"
            )


@contextmanager
def template_errors(messages: Messages, key: str) -> Iterator[None]:
    """Raise DataError if the chat template refuses the messages; `key` sets another template."""
    try:
        yield
    # TypeError: the template expects a text and got another value, such as a list of parts.
    except (TemplateError, TypeError) as error:
        texts = ""
        if isinstance(error, TypeError):
            texts = " (many templates accept only texts as contents)"
        raise DataError(
            f"the tokenizer's chat template refuses these messages ({error}): "
            f"{str(messages)[:120]}. Change the messages{texts}, or set {key}"
        ) from error
