"""Conversations with the tokens of them that are learnt: those of the assistant, as the chat
template writes them."""

import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers.utils.chat_template_utils import render_jinja_template

from verl.config.sft import SFTDataConfig
from verl.data.chat import (
    Messages,
    as_messages,
    check_roles,
    check_text,
    encode_conversations,
    refusals_told,
)
from verl.data.files import (
    Rows,
    as_file_list,
    encoded_in_chunks,
    open_rows,
    refuse_media,
    require_column,
    told_of,
)
from verl.protocol import DataProto
from verl.utils.errors import DataError
from verl.utils.logging import logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 1000  # conversations tokenised in one call
_MEDIA_COLUMNS = ("images", "videos")
# A template that marks the assistant's text itself.
_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Conversation(NamedTuple):
    """What is learnt from: the assistant's turns from message `first_learnt` on."""

    messages: Messages
    first_learnt: int
    template_arguments: dict[str, Any]


class Rendered(NamedTuple):
    """A conversation's text, and the characters of it that are learnt: (start, end) of each turn,
    ascending."""

    text: str
    spans: list[tuple[int, int]]


class Example(NamedTuple):
    """Token ids (n,) int32, and (n,) bool: whether a token is learnt."""

    ids: np.ndarray
    learnt: np.ndarray


def render(tokenizer: "PreTrainedTokenizerBase", conversation: Conversation) -> Rendered:
    """The text of a conversation by the tokenizer's chat template, and where the assistant speaks
    in it.

    A template's own `{% generation %}` blocks are taken at their word. Otherwise a turn begins
    where the same template would open an answer, and ends with the conversation up to it, less
    white space behind the token that ends a turn. DataError where a template refuses the messages,
    or writes a turn otherwise when others follow.
    """
    messages, first, arguments = conversation
    turns = [
        number for number in range(first, len(messages)) if messages[number]["role"] == "assistant"
    ]
    with refusals_told(messages, "data.chat_template"):
        check_roles(messages, lambda probed: _text(tokenizer, probed, arguments))
        if _MARKER.search(
            template := str(tokenizer.get_chat_template(tools=arguments.get("tools")))
        ):
            return _render_marked(tokenizer, template, conversation, len(turns))
        text = _text(tokenizer, messages, arguments)
        return Rendered(text, [_span(tokenizer, text, messages, turn, arguments) for turn in turns])


def _text(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    arguments: dict[str, Any],
    *,
    opens: bool = False,
) -> str:
    """`opens`: with what the template puts before an answer."""
    text: Any = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=opens, **arguments
    )
    return text


def _render_marked(
    tokenizer: "PreTrainedTokenizerBase", template: str, conversation: Conversation, turns: int
) -> Rendered:
    messages, first, arguments = conversation
    rendered: Any = render_jinja_template(
        conversations=[messages],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **arguments},
    )
    [text], [spans] = rendered
    if first:  # nothing but the last turn
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
            "the conversation begins with the assistant. Put what it answers before, or a system "
            "message"
        )
    before = _text(tokenizer, messages[:turn], arguments)
    upto = _text(tokenizer, messages[: turn + 1], arguments)
    for part, number in ((before, turn - 1), (upto, turn)):
        if not text.startswith(part):
            place = _common(part, text)
            raise DataError(
                f"the chat template rewrites history: message {number} alone ends in "
                f"{part[place : place + 40]!r}, and {text[place : place + 40]!r} stands there in "
                "the whole conversation. The model would learn from what it never sees when it "
                "answers. Make a row of each answer (data.prompt_key: the messages before it, "
                "data.response_key: itself), or set data.chat_template to one that does not, or "
                "marks {% generation %}"
            )
    # What stands before every answer. An answer may part from it early: an empty chain of thought,
    # say.
    start = _common(_text(tokenizer, messages[:turn], arguments, opens=True), upto)
    bare = upto.rstrip()
    # A model stops at the end of its turn; a newline that follows is the template's.
    end = len(bare) if bare.endswith(tuple(tokenizer.all_special_tokens)) else len(upto)
    return max(start, len(before)), end


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How long the beginning is that two sequences have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def encode(
    tokenizer: "PreTrainedTokenizerBase", conversations: Sequence[Conversation]
) -> list[Example]:
    """Token ids of whole conversations, as transformers' own `apply_chat_template` gives them, with
    those to learn.

    A token with characters on both sides of a turn's beginning is learnt, one on both sides of its
    end is not. Without a chat template a row is the prompt's tokens (see `encode_conversations`),
    the answer's, and the end of a sequence.
    """
    if tokenizer.chat_template is None:
        return _encode_plain(tokenizer, conversations)
    rendered = [render(tokenizer, conversation) for conversation in conversations]
    # A cut is found as the tokens that the text up to it shares with the whole: offsets of
    # characters are not to be trusted, for some tokenizers leave white space out of them.
    texts = [
        part
        for text, spans in rendered
        for part in (text, *(text[:cut] for span in spans for cut in span))
    ]
    encoded: Any = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, verbose=False
    )
    parts = iter(encoded["input_ids"])
    examples = []
    for _, spans in rendered:
        ids = next(parts)
        learnt = np.zeros(len(ids), dtype=bool)
        for _ in spans:
            start, end = _common(next(parts), ids), _common(next(parts), ids)
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
        tokenizer, [conversation.messages[:-1] for conversation in conversations]
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


class SFTDataset(Dataset):
    """Rows of one or more files, each a conversation; an item is its tokens.

    An item has `raw_prompt_ids`, all that stands before the first learnt token, `response_ids`, the
    rest, `learnt`, for each token of the rest whether it is learnt, and `uid`, the name of the row.
    A row is `data.prompt_key` (a text or messages) with its answer `data.response_key`, or, with
    `data.multiturn.enable`, a list of messages.

    All rows are tokenised when the dataset is made, 4 bytes a token: a bad row must not stop a run
    halfway. Raises DataError with file and row (counted from 0) for a missing column, a row that is
    too long (`data.truncation=error`), and one in which nothing is learnt.
    """

    def __init__(
        self,
        data_files: Any,
        tokenizer: "PreTrainedTokenizerBase",
        config: SFTDataConfig,
        *,
        split: str = "train",
    ) -> None:
        """`data_files`: a path or a list of paths; `split` ("train" or "val") picks from folders of
        several splits."""
        self.config = config
        self.tokenizer = tokenizer
        started = time.perf_counter()
        examples, self._names = list[Example](), list[str]()
        for file in as_file_list(data_files):
            rows = open_rows(file, split)
            for column in _MEDIA_COLUMNS:
                refuse_media(file, rows, column)
            for number, example in enumerate(self._examples(file, rows)):
                self._names.append(f"{file}, row {number}")
                examples.append(self._cut(self._names[-1], example))
        self._ends = np.cumsum([len(example.ids) for example in examples])
        self._ids = np.concatenate([example.ids for example in examples])
        self._learnt = np.concatenate([example.learnt for example in examples])
        logger.info(
            "Tokenised %s rows: %s tokens, %s of them learnt, in %.1f s.",
            f"{len(self):,}",
            f"{len(self._ids):,}",
            f"{self._learnt.sum():,}",
            time.perf_counter() - started,
        )

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, item: int) -> dict[str, Any]:
        end = int(self._ends[item])
        own = slice(int(self._ends[item - 1]) if item else 0, end)
        ids, learnt = self._ids[own], self._learnt[own]
        first = int(learnt.argmax())
        return {
            "raw_prompt_ids": ids[:first].tolist(),
            "response_ids": ids[first:].tolist(),
            "learnt": learnt[first:].tolist(),
            "uid": self._names[item],
        }

    @property
    def fingerprint(self) -> str:
        """Hex digest of all tokens: equal exactly when a cursor into one dataset fits the other."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (self._ends.astype("<i8"), self._ids.astype("<i4"), self._learnt):
            digest.update(part.tobytes())
        return digest.hexdigest()

    def _examples(self, file: str, rows: Rows) -> Iterator[Example]:
        conversations = (self._dialogues if self.config.multiturn.enable else self._pairs)(
            file, rows
        )
        return encoded_in_chunks(file, conversations, partial(encode, self.tokenizer), chunk=_CHUNK)

    def _pairs(self, file: str, rows: Rows) -> Iterator[Conversation]:
        config = self.config
        require_column(file, rows, config.prompt_key, "data.prompt_key")
        require_column(file, rows, config.response_key, "data.response_key")
        columns = rows.column(config.prompt_key), rows.column(config.response_key)
        for number, (prompt, answer) in enumerate(zip(*columns)):
            with told_of(f"{file}, row {number}, column '{config.prompt_key}'"):
                messages = as_messages(_inner(prompt, config.prompt_dict_keys))
            with told_of(f"{file}, row {number}, column '{config.response_key}'"):
                answer = _inner(answer, config.response_dict_keys)
                if not isinstance(answer, str) or not answer:
                    raise DataError(f"must be a text that is not empty, got {str(answer)[:80]!r}")
                check_text(answer)
            yield Conversation(
                [*messages, {"role": "assistant", "content": answer}], len(messages), {}
            )

    def _dialogues(self, file: str, rows: Rows) -> Iterator[Conversation]:
        keys = self.config.multiturn
        require_column(file, rows, keys.messages_key, "data.multiturn.messages_key")
        given = {"tools": keys.tools_key, "enable_thinking": keys.enable_thinking_key}
        given = {name: column for name, column in given.items() if column in rows.columns}
        columns = [rows.column(column) for column in (keys.messages_key, *given.values())]
        for number, (messages, *values) in enumerate(zip(*columns)):
            with told_of(f"{file}, row {number}, column '{keys.messages_key}'"):
                if isinstance(messages, str):
                    raise DataError(f"must be a list of messages, got a text: {messages[:80]!r}")
                messages = as_messages(messages)
            arguments = {name: value for name, value in zip(given, values) if value is not None}
            yield Conversation(messages, 0, arguments)

    def _cut(self, name: str, example: Example) -> Example:
        limit, side = self.config.max_length, self.config.truncation
        ids, learnt = example
        long = len(ids) > limit
        if long:
            if side == "error":
                raise DataError(
                    f"{name}: {len(ids)} tokens, data.max_length allows {limit}. Raise it, leave "
                    "the row out, or set data.truncation=left or right, which names the side to "
                    "cut off."
                )
            kept = slice(-limit, None) if side == "left" else slice(limit)
            ids, learnt = ids[kept], learnt[kept]
        learnt[:1] = False  # nothing stands before the first token that could predict it
        if not learnt.any():
            why = (
                f"within data.max_length={limit}, data.truncation={side}"
                if long
                else "the assistant says nothing"
            )
            raise DataError(f"{name}: no token to learn ({why}). Leave the row out.")
        return Example(ids, learnt)


def pad_examples(batch: DataProto) -> DataProto:
    """The columns that an engine reads, from those of B items: `input_ids` and `attention_mask` (B,
    T), prompts padded left and responses right, and `response_mask` (B, R), 1 where a token is
    learnt."""
    columns = batch.non_tensor_batch
    prompts, responses = columns["raw_prompt_ids"], columns["response_ids"]
    width = max(map(len, prompts))
    shape = len(prompts), width + max(map(len, responses))
    ids, attention, learnt = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    for row, (prompt, response, mask) in enumerate(zip(prompts, responses, columns["learnt"])):
        own = slice(width - len(prompt), width + len(response))
        ids[row, own] = torch.tensor([*prompt, *response])
        attention[row, own] = 1
        learnt[row, width : own.stop] = torch.tensor(mask, dtype=torch.int64)
    tensors = {"input_ids": ids, "attention_mask": attention, "response_mask": learnt[:, width:]}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": columns["uid"]})


def _inner(value: Any, keys: Sequence[str] | None) -> Any:
    for key in keys or ():
        if not isinstance(value, dict) or key not in value:
            raise DataError(f"must be a dict with the key '{key}', got {str(value)[:80]!r}")
        value = value[key]
    return value
