"""From chat messages to prompt token ids."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from verl.utils.errors import DataError
from verl.utils.logging import say_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Messages = list[Message]


def as_messages(value: Any) -> Messages:
    """A prompt as messages; a plain string is one message of the user (said once). DataError
    otherwise."""
    if isinstance(value, str):
        say_once("A prompt that is a plain string is taken as one message of the user.")
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(
            "must be a list of messages such as [{'role': 'user', 'content': 'Hi'}], or a string, "
            f"got {type(value).__name__}: {str(value)[:80]!r}"
        )
    for number, message in enumerate(value):
        _check_message(number, message)
    return value


def _check_message(number: int, message: Any) -> None:
    if not isinstance(message, dict):
        raise DataError(
            f"message {number} must be a dict with role and content, got {type(message).__name__}"
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise DataError(
            f"message {number} lacks its role (system, user, assistant ...): {str(message)[:80]}"
        )
    # Text, or a list of parts; null is an assistant's turn that only calls tools.
    if not (isinstance(content, (str, list)) or (content is None and message.get("tool_calls"))):
        raise DataError(f"message {number} lacks its content (a text): {str(message)[:80]}")
    for text in _texts(content):
        check_text(text, f"message {number} ")


def _texts(content: Any) -> Iterator[str]:
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text


def check_text(text: str, name: str = "") -> None:
    """DataError for a text that no tokenizer takes; `name` is what the message begins with."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name}must be text that can be written as UTF-8, got half a character (a lone "
            f"surrogate, {text[error.start]!r}) at place {error.start}: {text[:80]!r}. Write the "
            "whole character, or take it out"
        ) from error


def plain_text(messages: Messages, *, add_generation_prompt: bool = True) -> str:
    """The text of a conversation for a tokenizer without chat template.

    One message is its content and nothing else: base models continue text. Several are one `role:
    content` a line, and the line `assistant:` opens the answer.
    """
    if len(messages) == 1:
        return str(messages[0]["content"])
    lines = [f"{message['role']}: {message['content']}" for message in messages]
    return "\n".join([*lines, "assistant:"] if add_generation_prompt else lines)


def encode_conversations(
    tokenizer: "PreTrainedTokenizerBase",
    conversations: Sequence[Messages],
    *,
    add_generation_prompt: bool = True,
) -> list[list[int]]:
    """Token ids of each conversation, ready for an answer.

    The tokenizer's own template writes every special token itself. Without a template the text is
    `plain_text`, to which the tokenizer adds what it adds to the beginning of any text. DataError
    if a template refuses a conversation.
    """
    templated = tokenizer.chat_template is not None
    if not templated:
        say_once(
            "The tokenizer has no chat template: a single message is encoded as plain text, "
            "several as lines of 'role: content'. Set data.custom_chat_template for another form."
        )
    texts = [
        _render(tokenizer, messages, add_generation_prompt)
        if templated
        else plain_text(messages, add_generation_prompt=add_generation_prompt)
        for messages in conversations
    ]
    if not texts:
        return []
    # verbose=False: whether a prompt is too long is ours to say, against the limit of this run.
    encoded: Any = tokenizer(
        texts, add_special_tokens=not templated, return_attention_mask=False, verbose=False
    )
    ids: list[list[int]] = encoded["input_ids"]
    if templated:
        return ids
    # Some tokenizers also end a text; a prompt must stay open.
    return [row[:-1] if len(row) > 1 and row[-1] == tokenizer.eos_token_id else row for row in ids]


def apply_chat_template(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, *, add_generation_prompt: bool = True
) -> list[int]:
    """Token ids of one conversation; see `encode_conversations`."""
    return encode_conversations(tokenizer, [messages], add_generation_prompt=add_generation_prompt)[
        0
    ]


def _render(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, add_generation_prompt: bool
) -> str:
    with refusals_told(messages, "data.custom_chat_template"):
        text: Any = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    return text


@contextmanager
def refusals_told(messages: Messages, key: str) -> Iterator[None]:
    """DataError where the chat template refuses the messages; `key` sets another one."""
    try:
        yield
    # TypeError: a template that writes texts was given something else, a list of parts say.
    except (TemplateError, TypeError) as error:
        texts = (
            " (many templates take no content but a text)" if isinstance(error, TypeError) else ""
        )
        raise DataError(
            f"the tokenizer's chat template refuses these messages ({error}): "
            f"{str(messages)[:120]}. Change the messages{texts}, or set {key}"
        ) from error
