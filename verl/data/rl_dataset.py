"""Prompts with what is needed to score their answers."""

import difflib
import hashlib
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from verl.columns import COLUMNS
from verl.config import DataConfig
from verl.data.chat import Message, apply_chat_template, as_messages
from verl.data.files import (
    Rows,
    as_file_list,
    content_fingerprint,
    errors_at,
    open_rows,
    refuse_media,
    require_column,
)
from verl.data.lengths import prompt_lengths, tokenizer_fingerprint
from verl.utils.errors import DataError
from verl.utils.logging import logger, say_once

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A file's own column of such a name would stand beside the one that training writes, with other
# rows in it.
_RESERVED = {name for name, column in COLUMNS.items() if column.written_by != "data"} | {
    "raw_prompt",
    "raw_prompt_ids",
}
_DICT_COLUMNS = ("reward_model", "extra_info")
_OWN_CACHE_VERSION = "2"  # raised when `verl.data.chat` renders a conversation differently


class RLDataset(Dataset):
    """Rows of one or more files; an item is one prompt.

    An item is a dict with `raw_prompt` (messages), `raw_prompt_ids` (list of at most
    `max_prompt_length` token ids), `index` (row number in its file, unless the file has a column of
    that name) and every other column of the files, None where a file lacks it.

    Every row is checked when the dataset is made, prompt lengths included where a longer one is
    dropped or an error: a bad row must not stop a run halfway. Raises DataError with file, row
    (counted from 0) and column.
    """

    def __init__(
        self,
        data_files: Any,
        tokenizer: "PreTrainedTokenizerBase",
        config: DataConfig,
        *,
        split: str = "train",
    ) -> None:
        """`data_files`: a path or a list of paths; `split` ("train" or "val") picks from folders of
        several splits."""
        self.files = as_file_list(data_files)
        self.tokenizer = tokenizer
        self.config = config
        self._sources = [open_rows(file, split) for file in self.files]

        for file, rows in zip(self.files, self._sources):
            check_columns(file, rows, config)
            check_rows(file, rows, config)

        self.columns = _kept_columns(self._sources, config.prompt_key)
        # The split too: a folder may hold several.
        self._content = [f"{content_fingerprint(file)} {split}" for file in self.files]
        # (rows, 2): number of the file, number of the row in it
        self._kept = np.concatenate([self._kept_rows(number) for number in range(len(self.files))])

        if len(self._kept) == 0:
            raise DataError(
                f"All prompts of {', '.join(self.files)} are longer than data.max_prompt_length="
                f"{config.max_prompt_length} tokens, and data.filter_overlong_prompts drops them. "
                "Raise the limit."
            )

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, item: int) -> dict[str, Any]:
        source, number = map(int, self._kept[item])
        row = self._sources[source].row(number)
        messages = as_messages(row[self.config.prompt_key])
        with errors_at(f"{self.files[source]}, row {number}"):
            ids = apply_chat_template(self.tokenizer, messages)
        limit = self.config.max_prompt_length
        if len(ids) > limit:
            if self.config.truncation == "error":
                raise DataError(_too_long(self.files[source], number, len(ids), limit))
            ids = truncate(ids, limit, self.config.truncation)
        columns = {name: row.get(name) for name in self.columns}
        return {"raw_prompt_ids": ids, "raw_prompt": messages, "index": number, **columns}

    def column(self, name: str) -> Iterator[tuple[str, Any]]:
        """The file and number of every row, and what it has in a column of the files; None where a
        file has none."""
        for source, (file, rows) in enumerate(zip(self.files, self._sources)):
            kept = set(self._kept[self._kept[:, 0] == source, 1].tolist())
            values = rows.column(name) if name in rows.columns else repeat(None, len(rows))
            yield from (
                (f"{file}, row {number}", value)
                for number, value in enumerate(values)
                if number in kept
            )

    def keep_at_most(self, num_rows: int, *, shuffle: bool, seed: int) -> None:
        """Keep so many of the rows: the first, or with `shuffle` a draw that the seed decides.

        -1 keeps all. The rows that stay keep their order.
        """
        total = len(self._kept)
        if num_rows < 0 or num_rows >= total:
            return
        chosen = np.arange(num_rows)
        if shuffle:
            drawn = np.random.default_rng(seed).choice(total, size=num_rows, replace=False)
            chosen = np.sort(drawn)
        self._kept = self._kept[chosen]

    @property
    def fingerprint(self) -> str:
        """Hex digest of which rows stand where: equal exactly when a cursor into one dataset fits
        the other."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update("\0".join(self._content).encode())
        digest.update(self._kept.astype("<i8").tobytes())
        return digest.hexdigest()

    def _kept_rows(self, source: int) -> np.ndarray:
        """(rows, 2) of one file: all of them, or those not too long. DataError where a longer one
        is an error."""
        file = self.files[source]
        rows = self._sources[source]
        limit = self.config.max_prompt_length
        numbers = np.arange(len(rows))

        if self.config.filter_overlong_prompts or self.config.truncation == "error":
            lengths = self._lengths(source)
            long = lengths > limit
            if self.config.filter_overlong_prompts:
                numbers = numbers[~long]
                if long.any():
                    logger.info(
                        "Kept %d of %d rows of %s; %d are longer than data.max_prompt_length=%d.",
                        len(numbers),
                        len(rows),
                        file,
                        int(long.sum()),
                        limit,
                    )
            elif long.any():
                first = int(np.argmax(long))
                raise DataError(_too_long(file, first, int(lengths[first]), limit, int(long.sum())))

        return np.stack([np.full_like(numbers, source), numbers], axis=1)

    def _lengths(self, source: int) -> np.ndarray:
        parts = (
            _OWN_CACHE_VERSION,
            self._content[source],
            tokenizer_fingerprint(self.tokenizer),
            self.config.prompt_key,
        )
        key = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
        rows = self._sources[source]
        conversations = map(as_messages, rows.column(self.config.prompt_key))
        return prompt_lengths(
            self.tokenizer, conversations, count=len(rows), key=key, name=self.files[source]
        )


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """At most `limit` ids: `side` "left" or "right" is the side cut off, "middle" keeps both
    ends."""
    if len(ids) <= limit:
        return ids
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    if side == "middle":
        head = limit // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]
    raise DataError(f"data.truncation must be left, right or middle to cut a prompt, got '{side}'.")


def check_columns(file: str, rows: Rows, config: DataConfig) -> None:
    """DataError if the prompt column is missing, or a column looks like a misspelt one that is
    missing."""
    named_by = {config.prompt_key: "data.prompt_key", config.reward_fn_key: "data.reward_fn_key"}
    known = [config.prompt_key, config.reward_fn_key, *_DICT_COLUMNS, "ability"]
    missing = [name for name in known if name not in rows.columns]

    for column in rows.columns:
        meant = (
            difflib.get_close_matches(column, missing, n=1, cutoff=0.8)
            if column not in known
            else []
        )
        if meant:
            or_key = f", or set {named_by[meant[0]]}={column}" if meant[0] in named_by else ""
            raise DataError(
                f"{file}: unknown column '{column}'; did you mean '{meant[0]}', which is missing? "
                f"Rename it{or_key}."
            )

    require_column(file, rows, config.prompt_key, "data.prompt_key")


def check_rows(file: str, rows: Rows, config: DataConfig) -> None:
    """DataError for the first row with an empty prompt, with images or videos, or with a column of
    ours of the wrong type."""
    key = config.prompt_key
    refuse_media(file, rows, config.image_key)
    refuse_media(file, rows, config.video_key)

    for number, value in enumerate(rows.column(key)):
        with errors_at(f"{file}, row {number}, column '{key}'"):
            last = as_messages(value)[-1]
            if last["role"] != "tool" and not _has_content(last):
                raise DataError(
                    f"ends with an empty message, so there is nothing to answer: {str(last)[:80]}"
                )

    if config.reward_fn_key in rows.columns:
        _check_type(
            file,
            config.reward_fn_key,
            rows.column(config.reward_fn_key),
            str,
            "a text such as 'openai/gsm8k'",
        )

    for name in _DICT_COLUMNS:
        if name in rows.columns:
            _check_type(file, name, rows.column(name), dict, "a dict")


def _has_content(message: Message) -> bool:
    content = message.get("content")
    return bool(content.strip() if isinstance(content, str) else content)


def _check_type(file: str, column: str, values: Iterable[Any], kind: type, expected: str) -> None:
    for number, value in enumerate(values):
        if value is not None and not isinstance(value, kind):
            raise DataError(
                f"{file}, row {number}, column '{column}': must be {expected}, "
                f"got {type(value).__name__}: {str(value)[:80]!r}."
            )


def _kept_columns(sources: list[Rows], prompt_key: str) -> list[str]:
    """Columns of all files that an item carries beside the prompt."""
    columns = [
        name
        for name in dict.fromkeys(name for rows in sources for name in rows.columns)
        if name != prompt_key
    ]
    for name in columns:
        if name in _RESERVED:
            say_once(
                f"The data's column '{name}' is left out: training writes a column of that name."
            )
    return [name for name in columns if name not in _RESERVED]


def _too_long(file: str, row: int, length: int, limit: int, count: int = 1) -> str:
    others = f" ({count} rows of this file are too long)" if count > 1 else ""
    return (
        f"{file}, row {row}: the prompt has {length} tokens, data.max_prompt_length allows "
        f"{limit}{others}. Raise it, or set data.filter_overlong_prompts=true (drop such rows) or "
        "data.truncation=left, right or middle (cut them)."
    )
