"""Conversations as tokens, with a mask of those to learn: the assistant's turns."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from verl.data.chat import (
    Messages,
    as_template_reads,
    check_roles,
    encode_conversations,
    render_by_template,
    template_errors,
)
from verl.utils.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A template that marks the assistant's text itself.
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Conversation(NamedTuple):
    """Messages to learn from: the assistant's turns from message `first_learnt` on."""

    messages: Messages
    first_learnt: int
    template_arguments: dict[str, Any]
    images: tuple[Any, ...] = ()  # in the order of their parts in the messages


class Rendered(NamedTuple):
    """A conversation's text, and its learnt characters: (start, end) of each turn, ascending."""

    text: str
    spans: list[tuple[int, int]]


class Example(NamedTuple):
    """Token ids (n,) int32, and (n,) bool: whether a token is learnt."""

    ids: np.ndarray
    learnt: np.ndarray
    images: tuple[Any, ...] = ()


def render(tokenizer: "PreTrainedTokenizerBase", conversation: Conversation) -> Rendered:
    """Render a conversation by the tokenizer's chat template, and find the assistant's turns.

    The `{% generation %}` blocks of a template mark the turns if it has them. Otherwise a turn
    begins where the same template would open an answer, and ends with the conversation up to it,
    without white space after the token that ends a turn.

    Raises DataError if the template refuses the messages, or writes a turn differently when others
    follow.
    """
    messages, first, arguments, _ = conversation
    turns = []
    for number in range(first, len(messages)):
        if messages[number]["role"] == "assistant":
            turns.append(number)

    with template_errors(messages, "data.chat_template"):
        check_roles(messages, lambda probed: render_by_template(tokenizer, probed, **arguments))
        template = str(tokenizer.get_chat_template(tools=arguments.get("tools")))
        if _MARKER.search(template):
            return _render_marked(tokenizer, template, conversation, len(turns))

        if not turns:
            roles = dict.fromkeys(message["role"] for message in messages)
            raise DataError(
                f"no token to learn: no message has the role assistant, got {', '.join(roles)}. "
                "Rename the roles, or leave the row out"
            )
        text = render_by_template(tokenizer, messages, **arguments)
        spans = [_span(tokenizer, text, messages, turn, arguments) for turn in turns]
        return Rendered(text, spans)


def _render_marked(
    tokenizer: "PreTrainedTokenizerBase", template: str, conversation: Conversation, turns: int
) -> Rendered:
    messages, first, arguments, _ = conversation
    rendered: Any = render_jinja_template(
        conversations=[as_template_reads(tokenizer, messages)],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **arguments},
    )
    [text], [spans] = rendered
    if first:  # only the last turn is learnt
        spans = spans[-turns:]
    return Rendered(text, [(start, end) for start, end in spans])


def _span(
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    messages: Messages,
    turn: int,
    arguments: dict[str, Any],
) -> tuple[int, int]:
    if turn == 0:
        raise DataError(
            "the conversation begins with the assistant. Put the message that it answers, or a "
            "system message, before it"
        )

    before = render_by_template(tokenizer, messages[:turn], **arguments)
    upto = render_by_template(tokenizer, messages[: turn + 1], **arguments)
    for part, number in ((before, turn - 1), (upto, turn)):
        if not text.startswith(part):
            place = _common(part, text)
            raise DataError(
                f"the chat template rewrites history: message {number} alone ends in "
                f"{part[place : place + 40]!r}, but the whole conversation has "
                f"{text[place : place + 40]!r} there. The model would learn from text that it "
                "never sees when it answers. Make a row of each answer (data.prompt_key: the "
                "messages before it, data.response_key: the answer), or set data.chat_template to "
                "one that keeps history, or marks {% generation %}"
            )

    # The text before every answer. An answer may differ from it early, by an empty chain of
    # thought for example.
    opened = render_by_template(tokenizer, messages[:turn], add_generation_prompt=True, **arguments)
    start = _common(opened, upto)
    bare = upto.rstrip()
    # A model stops at the end of its turn; the template adds the newline that follows.
    end = len(bare) if bare.endswith(tuple(tokenizer.all_special_tokens)) else len(upto)
    return max(start, len(before)), end


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def encode(
    tokenizer: "PreTrainedTokenizerBase", conversations: Sequence[Conversation]
) -> list[Example]:
    """Tokenize whole conversations, and mark the learnt tokens.

    The ids are those of transformers' `apply_chat_template`. A token with characters on both sides
    of a turn's beginning is learnt, one on both sides of its end is not. Without a chat template a
    row is the tokens of the prompt (see `encode_conversations`) and of the answer, and the end
    token.
    """
    if tokenizer.chat_template is None:
        return _encode_plain(tokenizer, conversations)

    # A cut is the number of tokens that the text up to it shares with the whole text. Character
    # offsets are not reliable: some tokenizers leave white space out of them.
    rendered = [render(tokenizer, conversation) for conversation in conversations]
    texts = []
    for text, spans in rendered:
        texts.append(text)
        for start, end in spans:
            texts.append(text[:start])
            texts.append(text[:end])
    encoded: Any = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, verbose=False
    )
    parts = iter(encoded["input_ids"])

    examples = []
    for _, spans in rendered:
        ids = next(parts)
        learnt = np.zeros(len(ids), dtype=bool)
        for _ in spans:
            start = _common(next(parts), ids)
            end = _common(next(parts), ids)
            learnt[start:end] = True
        examples.append(Example(np.array(ids, dtype=np.int32), learnt))
    return examples


def _encode_plain(
    tokenizer: "PreTrainedTokenizerBase", conversations: Sequence[Conversation]
) -> list[Example]:
    if any(conversation.first_learnt == 0 for conversation in conversations):
        raise DataError(
            "the tokenizer has no chat template, which conversations of several turns need. Set "
            "data.chat_template"
        )

    prompts = encode_conversations(
        tokenizer,
        [conversation.messages[:-1] for conversation in conversations],
        template_key="data.chat_template",
    )
    texts = [conversation.messages[-1]["content"] for conversation in conversations]
    encoded: Any = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, verbose=False
    )
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    examples = []
    for prompt, answer in zip(prompts, encoded["input_ids"]):
        ids = np.array([*prompt, *answer, *end], dtype=np.int32)
        examples.append(Example(ids, np.arange(len(ids)) >= len(prompt)))
    return examples
