"""The dataset of conversations to learn from."""

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from verl.config.sft import SFTDataConfig
from verl.data.chat import Messages, as_messages, check_text
from verl.data.conversations import Conversation, Example, encode
from verl.data.files import (
    Rows,
    as_file_list,
    encoded_in_chunks,
    errors_at,
    open_rows,
    require_column,
)
from verl.data.picture_parts import messages_and_sources
from verl.data.pictures import PictureReader, refuse_media
from verl.data.roles import RoleCheck
from verl.data.sampler import chosen_rows
from verl.utils.errors import DataError
from verl.utils.json_text import parse_json
from verl.utils.logging import logger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SFTDataset(Dataset):
    """Rows of one or more files, each a conversation; an item is its tokens.

    An item has `raw_prompt_ids` (all tokens before the first learnt one), `response_ids` (the
    rest), `learnt` (for each token of the rest, whether it is learnt) and `uid` (the name of the
    row). A row is `data.prompt_key` (a text or messages) with its answer `data.response_key`, or,
    with `data.multiturn.enable`, a list of messages.

    All rows are tokenized when the dataset is made, 4 bytes a token, so a bad row cannot stop a run
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
        pictures: PictureReader | None = None,
    ) -> None:
        """Read and tokenize all rows.

        Args:
            data_files: a path or a list of paths.
            split: "train" or "val", to select from folders of several splits.
            pictures: reads the images of rows; None: a row that has any is an error.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.pictures = pictures
        # by row: its images, and the folder where their paths begin
        self._images: dict[int, tuple[tuple[Any, ...], Path]] = {}
        self._names: list[str] = []  # by row: its file and number
        started = time.perf_counter()
        examples: list[Example] = []
        num_cut = 0
        for file in as_file_list(data_files):
            for number, example in enumerate(self._examples(file, split)):
                name = f"{file}, row {number}"
                if example.images:
                    self._images[len(examples)] = example.images, Path(file).parent
                num_cut += len(example.ids) > config.max_length
                examples.append(self._cut(name, example))
                self._names.append(name)

        if num_cut:
            logger.warning(
                "%d of %d rows have more than data.max_length=%d tokens and are cut, as "
                "data.truncation=%s asks.",
                num_cut,
                len(examples),
                config.max_length,
                config.truncation,
            )

        self._ends = np.cumsum([len(example.ids) for example in examples])
        self._ids = np.concatenate([example.ids for example in examples])
        self._learnt = np.concatenate([example.learnt for example in examples])
        logger.info(
            "Tokenized %s rows: %s tokens, %s of them learnt, in %.1f s.",
            f"{len(self):,}",
            f"{len(self._ids):,}",
            f"{self._learnt.sum():,}",
            time.perf_counter() - started,
        )

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, item: int) -> dict[str, Any]:
        start = int(self._ends[item - 1]) if item else 0
        end = int(self._ends[item])
        ids = self._ids[start:end]
        learnt = self._learnt[start:end]
        first = int(learnt.argmax())
        values = {
            "raw_prompt_ids": ids[:first].tolist(),
            "response_ids": ids[first:].tolist(),
            "learnt": learnt[first:].tolist(),
            "uid": self._names[item],
        }
        if self.pictures is not None:
            images, folder = self._images.get(item, ((), Path()))
            with errors_at(self._names[item]):
                prepared = self.pictures.prepare_all(images, folder)
            values["prepared_pictures"] = prepared
        return values

    def keep_at_most(self, num_rows: int, *, shuffle: bool, seed: int) -> None:
        """Keep rows as `RLDataset.keep_at_most` does."""
        chosen = chosen_rows(len(self), num_rows, shuffle=shuffle, seed=seed).tolist()
        lengths = np.diff(self._ends, prepend=0)
        is_chosen = np.zeros(len(self), dtype=bool)
        is_chosen[chosen] = True
        of_chosen = np.repeat(is_chosen, lengths)

        self._ids = self._ids[of_chosen]
        self._learnt = self._learnt[of_chosen]
        self._ends = np.cumsum(lengths[chosen])
        self._names = [self._names[row] for row in chosen]
        images = self._images
        self._images = {new: images[old] for new, old in enumerate(chosen) if old in images}

    @property
    def fingerprint(self) -> str:
        """Return a hex digest of all tokens.

        Two datasets have the same one exactly if a cursor into one fits the other.
        """
        digest = hashlib.blake2b(digest_size=16)
        for part in (self._ends.astype("<i8"), self._ids.astype("<i4"), self._learnt):
            digest.update(part.tobytes())
        return digest.hexdigest()

    def _examples(self, file: str, split: str) -> Iterator[Example]:
        rows = open_rows(file, split)
        refuse_media(file, rows, self.config, self.pictures)
        read = self._dialogues if self.config.multiturn.enable else self._pairs
        return encoded_in_chunks(file, read(file, rows), partial(self._encode, Path(file).parent))

    def _encode(self, folder: Path, conversations: Sequence[Conversation]) -> list[Example]:
        """Tokenize conversations, with the tokens of their pictures."""
        examples = encode(self.tokenizer, conversations)
        if self.pictures is None:
            return examples
        pictured = []
        for conversation, example in zip(conversations, examples):
            pictured.append(_with_pictures(self.pictures, example, conversation.images, folder))
        return pictured

    def _messages(self, prompt: Any, media: tuple[Any, Any]) -> tuple[Messages, tuple[Any, ...]]:
        """Return messages, and the images and videos at their places."""
        if self.pictures is None:
            return as_messages(prompt), ()
        return messages_and_sources(prompt, *media)

    def _pairs(self, file: str, rows: Rows) -> Iterator[Conversation]:
        config = self.config
        if config.prompt_key not in rows.columns and config.multiturn.messages_key in rows.columns:
            raise DataError(
                f"{file}: the column '{config.prompt_key}' is missing, but there is the column "
                f"'{config.multiturn.messages_key}'. Set data.multiturn.enable=True to learn from "
                "whole conversations, or name your columns in data.prompt_key and "
                "data.response_key."
            )
        require_column(file, rows, config.prompt_key, "data.prompt_key")
        require_column(file, rows, config.response_key, "data.response_key")
        prompts = map(rows.as_written, rows.column(config.prompt_key))
        answers = rows.column(config.response_key)
        columns = zip(prompts, answers, self._media(rows))
        roles = RoleCheck(self.tokenizer)
        for number, (prompt, answer, media) in enumerate(columns):
            with errors_at(f"{file}, row {number}, column '{config.prompt_key}'"):
                prompt = _inner(prompt, config.prompt_dict_keys)
                messages, sources = self._messages(prompt, media)
            roles.read(messages, number)
            with errors_at(f"{file}, row {number}, column '{config.response_key}'"):
                answer = _inner(answer, config.response_dict_keys)
                if not isinstance(answer, str) or not answer:
                    raise DataError(f"must be a text that is not empty, got {repr(answer)[:80]}")
                check_text(answer)

            whole = [*messages, {"role": "assistant", "content": answer}]
            yield Conversation(whole, len(messages), {}, sources)
        roles.warn(file, config.prompt_key)

    def _media(self, rows: Rows) -> Iterable[tuple[Any, Any]]:
        """Return the images and the videos of each row."""
        columns: list[Iterable[Any]] = []
        for key in (self.config.image_key, self.config.video_key):
            is_read = self.pictures is not None and key in rows.columns
            columns.append(rows.column(key) if is_read else repeat(None))
        return zip(*columns)

    def _dialogues(self, file: str, rows: Rows) -> Iterator[Conversation]:
        keys = self.config.multiturn
        require_column(file, rows, keys.messages_key, "data.multiturn.messages_key")
        optional = {"tools": keys.tools_key, "enable_thinking": keys.enable_thinking_key}
        given = {name: column for name, column in optional.items() if column in rows.columns}
        columns = [rows.column(column) for column in (keys.messages_key, *given.values())]
        columns.append(self._media(rows))
        roles = RoleCheck(self.tokenizer)
        for number, (messages, *values, media) in enumerate(zip(*columns)):
            with errors_at(f"{file}, row {number}, column '{keys.messages_key}'"):
                if isinstance(messages, str):
                    raise DataError(f"must be a list of messages, got a text: {messages[:80]!r}")
                messages, sources = self._messages(rows.as_written(messages), media)
            roles.read(messages, number)

            arguments = {name: value for name, value in zip(given, values) if value is not None}
            if "tools" in arguments:
                with errors_at(f"{file}, row {number}, column '{keys.tools_key}'"):
                    arguments["tools"] = _tools(rows.as_written(arguments["tools"]))
            thinks = arguments.get("enable_thinking", False)
            if not isinstance(thinks, bool):  # a template would take the text "false" for true
                raise DataError(
                    f"{file}, row {number}, column '{keys.enable_thinking_key}': must be true or "
                    f"false, got {type(thinks).__name__}: {str(thinks)[:80]!r}."
                )
            yield Conversation(messages, 0, arguments, sources)
        roles.warn(file, keys.messages_key)

    def _cut(self, name: str, example: Example) -> Example:
        limit = self.config.max_length
        side = self.config.truncation
        ids, learnt, images = example
        long = len(ids) > limit
        if long:
            if side == "error" or images:  # a cut could go through a picture
                way = "set data.truncation=left or right, which names the side to cut off."
                if images:
                    way = "make its pictures smaller: rows with pictures are never cut."
                raise DataError(
                    f"{name}: {len(ids)} tokens, data.max_length allows {limit}. Raise it, leave "
                    f"the row out, or {way}"
                )
            kept = slice(-limit, None) if side == "left" else slice(limit)
            ids = ids[kept]
            learnt = learnt[kept]

        learnt[:1] = False  # no token precedes the first one, so nothing can predict it
        if not learnt.any():
            why = "the assistant says nothing"
            if long:
                why = f"within data.max_length={limit}, data.truncation={side}"
            raise DataError(f"{name}: no token to learn ({why}). Leave the row out.")
        return Example(ids, learnt, images)


def _with_pictures(
    reader: PictureReader, example: Example, images: tuple[Any, ...], folder: Path
) -> Example:
    """Return an example with the tokens of its pictures, none of which is learnt."""
    pictures = reader.prepare_all(images, folder)
    ids, learnt, _ = example
    last = max(reader.places(ids.tolist(), pictures), default=-1)
    first = int(learnt.argmax())
    if last >= first and learnt.any():
        raise DataError(
            "has an image or a video after the first answer that is learnt. Make a row of "
            "each answer (data.prompt_key: the messages before it, data.response_key: the "
            "answer)"
        )

    expanded = np.asarray(reader.expand(ids.tolist(), pictures), np.int32)
    # All that is added stands before the first token that is learnt.
    added = np.zeros(len(expanded), dtype=bool)
    added[len(expanded) - (len(ids) - last - 1) :] = learnt[last + 1 :]
    return Example(expanded, added, images)


def _tools(value: Any) -> list[dict[str, Any]]:
    """Return tool schemas that are a list, or the JSON text of one as in many data sets."""
    tools = value
    if isinstance(value, str):
        try:
            tools = parse_json(value)
        except ValueError as error:
            raise DataError(f"is no JSON text ({error}): {value[:80]!r}") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            "must be a list of tool schemas such as [{'type': 'function', 'function': {...}}], or "
            f"the JSON text of one, got {str(value)[:80]!r}"
        )
    return tools


def _inner(value: Any, keys: Sequence[str] | None) -> Any:
    for key in keys or ():
        if not isinstance(value, dict) or key not in value:
            raise DataError(f"must be a dict with the key '{key}', got {str(value)[:80]!r}")
        value = value[key]
    return value
