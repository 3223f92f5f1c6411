"""The dataset of prompts, with the columns that rewards need."""

import hashlib
import logging
import os
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from verl.columns import COLUMNS
from verl.config import DataConfig
from verl.data.chat import (
    Message,
    Messages,
    apply_chat_template,
    as_messages,
    check_text,
    way_to_convert,
)
from verl.data.files import (
    Rows,
    as_file_list,
    content_fingerprint,
    errors_at,
    open_rows,
    require_column,
)
from verl.data.lengths import prompt_lengths, tokenizer_fingerprint
from verl.data.picture_parts import (
    has_image_placeholder,
    has_picture_parts,
    without_picture_parts,
)
from verl.data.pictures import PictureReader, refuse_media
from verl.data.prompt_limit import all_too_long, fit_prompt, rows_to_keep
from verl.data.roles import RoleCheck
from verl.data.sampler import chosen_rows
from verl.models.pictures import Pictures
from verl.utils.errors import DataError
from verl.utils.logging import logger, say_once
from verl.utils.registry import misspelled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Names of columns that training writes. A file's own column of such a name would clash with it.
_WRITTEN_LATER = {name for name, column in COLUMNS.items() if column.written_by != "data"}
_RESERVED = {*_WRITTEN_LATER, "raw_prompt", "raw_prompt_ids"}
_DICT_COLUMNS = ("reward_model", "extra_info")
_OWN_CACHE_VERSION = "4"  # raise it when `verl.data.chat` renders a conversation differently


class RLDataset(Dataset):
    """Rows of one or more files; an item is one prompt.

    An item is a dict with `raw_prompt` (messages), `raw_prompt_ids` (list of at most
    `max_prompt_length` token ids), `index` (row number in its file, unless the file has a column of
    that name) and every other column of the files, which is None if its file lacks it.

    All rows are checked when the dataset is created, so that a bad row cannot stop a run halfway.
    That includes prompt lengths if longer prompts are dropped or an error. Raises DataError with
    file, row (counted from 0) and column.
    """

    num_threads: int | None = None  # that prepare the pictures of a batch; None: one a core

    def __init__(
        self,
        data_files: Any,
        tokenizer: "PreTrainedTokenizerBase",
        config: DataConfig,
        *,
        split: str = "train",
        pictures: PictureReader | None = None,
    ) -> None:
        """Read and check all rows.

        Args:
            data_files: a path or a list of paths.
            split: "train" or "val", to select from folders of several splits.
            pictures: reads the images of rows; None: a row that has any is an error.
        """
        self.files = as_file_list(data_files)
        self.tokenizer = tokenizer
        self.config = config
        self.pictures = pictures
        self._sources = self._open_files(split)

        for file, rows in zip(self.files, self._sources):
            check_columns(file, rows, config)
            check_rows(file, rows, config, pictures, RoleCheck(tokenizer))

        self._pictured: list[np.ndarray] = []  # by file: which rows have pictures
        self.columns = self._columns_of_items()
        self._content = self._fingerprints(split)
        # (rows, 2): number of the file, number of the row in it
        self._kept = np.concatenate([self._kept_rows(number) for number in range(len(self.files))])

        self._require_rows()

    def _open_files(self, split: str) -> list[Rows]:
        """Return the rows of each of `files`."""
        return [open_rows(file, split) for file in self.files]

    def _columns_of_items(self) -> list[str]:
        """Return the columns of the files that an item has in addition to the prompt."""
        return _kept_columns(self._sources, self.config.prompt_key)

    def _fingerprints(self, split: str) -> list[str]:
        """Return a text for the content of each of `files`."""
        # The split is part of the content, because a folder may have several.
        return [f"{content_fingerprint(file)} {split}" for file in self.files]

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, item: int) -> dict[str, Any]:
        source, number = map(int, self._kept[item])
        row = self._sources[source].row(number)
        ids, messages, pictures = self._encoded(source, number, row)

        file = self.files[source]
        ids = fit_prompt(
            ids,
            self.config,
            f"{file}, row {number}",
            pictured=bool(pictures),
            whose=f"{file}: prompts",
        )

        values: dict[str, Any] = {"raw_prompt_ids": ids, "raw_prompt": messages, "index": number}
        if self.pictures is not None:
            values["prepared_pictures"] = pictures
        return {**values, **{name: row.get(name) for name in self.columns}}

    def __getitems__(self, items: Sequence[int]) -> list[dict[str, Any]]:
        """Return several items at once, as torch's loaders ask for them.

        Threads prepare the pictures that are no longer in memory.
        """
        # A subclass may draw random numbers, and threads would change their order.
        is_ours = type(self).__getitem__ is RLDataset.__getitem__
        if self.pictures is None or not is_ours:
            return [self[item] for item in items]
        with ThreadPoolExecutor(self.num_threads or os.cpu_count()) as pool:
            return list(pool.map(self.__getitem__, items))

    def _encoded(
        self, source: int, number: int, row: dict[str, Any]
    ) -> tuple[list[int], Messages, Pictures]:
        """Return token ids, messages and pictures of a row."""
        prompt = self._sources[source].as_written(row[self.config.prompt_key])
        with errors_at(f"{self.files[source]}, row {number}"):
            if self.pictures is None:
                messages = as_messages(prompt)
                return apply_chat_template(self.tokenizer, messages), messages, ()
            images = row.get(self.config.image_key)
            videos = row.get(self.config.video_key)
            return self.pictures.encode(prompt, images, Path(self.files[source]).parent, videos)

    def column(self, name: str) -> Iterator[tuple[str, Any]]:
        """Yield the place (file and number) of every row, and its value in a column of the files.

        The value is None if the file has no such column.
        """
        for source, (file, rows) in enumerate(zip(self.files, self._sources)):
            kept = set(self._kept[self._kept[:, 0] == source, 1].tolist())
            values = rows.column(name) if name in rows.columns else repeat(None, len(rows))
            for number, value in enumerate(values):
                if number in kept:
                    yield f"{file}, row {number}", value

    def have_pictures(self) -> Iterator[bool]:
        """Yield for every row, in the order of `column`, whether its prompt has pictures."""
        for source, number in self._kept.tolist():
            yield bool(self._pictured[source][number])

    def drop_overlong(self, places: Collection[str]) -> None:
        """Drop rows that `column` gives at `places`, for prompts that are longer than they seem."""
        if not places:
            return
        total = len(self._kept)
        kept = [number for number, place in enumerate(self._places()) if place not in places]
        self._kept = self._kept[kept]
        self._require_rows()
        logger.info(
            "Kept %d of %d rows of %s; with their tools the prompts of %d are longer than "
            "data.max_prompt_length=%d.",
            len(kept),
            total,
            ", ".join(self.files),
            total - len(kept),
            self.config.max_prompt_length,
        )

    def keep_at_most(self, num_rows: int, *, shuffle: bool, seed: int) -> None:
        """Keep the first `num_rows` rows, or with `shuffle` a random choice that the seed fixes.

        -1 keeps all. The kept rows stay in order.
        """
        chosen = chosen_rows(len(self._kept), num_rows, shuffle=shuffle, seed=seed)
        self._kept = self._kept[chosen]

    def _places(self) -> Iterator[str]:
        """Yield file and number of every kept row, as `column` does."""
        for source, number in self._kept.tolist():
            yield f"{self.files[source]}, row {number}"

    def _require_rows(self) -> None:
        if len(self._kept) == 0:
            raise all_too_long(", ".join(self.files), self.config)

    @property
    def fingerprint(self) -> str:
        """Return a hex digest of the rows and their order.

        Two datasets have the same one exactly if a cursor into one fits the other.
        """
        digest = hashlib.blake2b(digest_size=16)
        digest.update("\0".join(self._content).encode())
        digest.update(self._kept.astype("<i8").tobytes())
        return digest.hexdigest()

    def _kept_rows(self, source: int) -> np.ndarray:
        """Return (file number, row number), shape (rows, 2), of the rows to keep of one file.

        Raises DataError if a row is too long and `truncation` is "error".
        """
        file = self.files[source]
        num_rows = len(self._sources[source])
        measures = self.config.filter_overlong_prompts or self.config.truncation == "error"
        lengths = np.zeros(num_rows, dtype=np.int32)
        pictured = np.zeros(num_rows, dtype=bool)
        if self._has_pictures(source):
            lengths, pictured = self._lengths_with_pictures(source)
        else:
            if self.pictures is not None:
                self._require_no_placeholders(source)
            if measures:
                lengths = self._lengths(source)
        self._pictured.append(pictured)

        numbers = rows_to_keep(file, lengths, pictured, self.config, several="rows of this file")
        return np.stack([np.full_like(numbers, source), numbers], axis=1)

    def _has_pictures(self, source: int) -> bool:
        if self.pictures is None:
            return False
        rows = self._sources[source]
        if self.config.image_key in rows.columns or self.config.video_key in rows.columns:
            return True
        return any(map(has_picture_parts, rows.column(self.config.prompt_key)))

    def _require_no_placeholders(self, source: int) -> None:
        """Raise DataError if prompts have places for images, and the file has no column of images.

        The column may have another name, so the error has the names of all columns.
        """
        rows = self._sources[source]
        prompts = map(as_messages, rows.column(self.config.prompt_key))
        if any(map(has_image_placeholder, prompts)):
            require_column(self.files[source], rows, self.config.image_key, "data.image_key")

    def _lengths_with_pictures(self, source: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of tokens of each row, and whether it has pictures.

        This also finds the pictures that cannot be read.
        """
        rows = self._sources[source]
        start = time.perf_counter()

        def measure(number: int) -> tuple[int, bool]:
            ids, _, pictures = self._encoded(source, number, rows.row(number))
            return len(ids), bool(pictures)

        # Decoding and resizing release the interpreter, so threads prepare several rows at once.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            measured = list(pool.map(measure, range(len(rows))))
        lengths, pictured = map(np.array, zip(*measured))
        logger.info(
            "Read the pictures of %s rows of %s in %.1f s.",
            f"{len(rows):,}",
            self.files[source],
            time.perf_counter() - start,
        )
        return lengths, pictured

    def _lengths(self, source: int) -> np.ndarray:
        """Return the number of tokens of each row of text."""
        parts = (
            _OWN_CACHE_VERSION,
            self._content[source],
            tokenizer_fingerprint(self.tokenizer),
            self.config.prompt_key,
        )
        key = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
        rows = self._sources[source]
        prompts = map(rows.as_written, rows.column(self.config.prompt_key))
        conversations = map(as_messages, prompts)
        return prompt_lengths(
            self.tokenizer, conversations, count=len(rows), key=key, name=self.files[source]
        )


def check_columns(file: str, rows: Rows, config: DataConfig) -> None:
    """Raise DataError if the prompt column is missing, or a column seems to be misspelled."""
    named_by = {config.prompt_key: "data.prompt_key", config.reward_fn_key: "data.reward_fn_key"}
    known = [config.prompt_key, config.reward_fn_key, *_DICT_COLUMNS, "ability"]
    missing = [name for name in known if name not in rows.columns]

    for column in rows.columns:
        if column in known:
            continue
        meant = misspelled(column, missing)
        if meant is not None:
            or_key = f", or set {named_by[meant]}={column}" if meant in named_by else ""
            raise DataError(
                f"{file}: unknown column '{column}'; did you mean '{meant}', which is missing? "
                f"Rename it{or_key}."
            )

    require_column(file, rows, config.prompt_key, "data.prompt_key")
    # The usual column may be absent where a function or a model gives the score.
    if config.reward_fn_key != DataConfig().reward_fn_key:
        require_column(file, rows, config.reward_fn_key, "data.reward_fn_key")


def check_rows(
    file: str,
    rows: Rows,
    config: DataConfig,
    pictures: PictureReader | None,
    roles: RoleCheck,
) -> None:
    """Raise DataError for the first invalid row, and warn of roles that seem to be misspelt.

    A row is invalid if its prompt is empty, if it has images or videos without a model that reads
    them, or if a column that this package reads has the wrong type.
    """
    refuse_media(file, rows, config, pictures)

    key = config.prompt_key
    for number, value in enumerate(rows.column(key)):
        try:
            messages = check_prompt(value, reads_pictures=pictures is not None)
        except DataError as error:  # `errors_at` in every round would take as long as the check
            raise DataError(f"{file}, row {number}, column '{key}': {error}.") from error
        roles.read(messages, number)
    roles.warn(file, key)

    key = config.reward_fn_key
    if key in rows.columns:
        _check_type(file, key, rows, str, "a text such as 'openai/gsm8k'")
        _check_texts(file, key, rows)

    for name in _DICT_COLUMNS:
        if name in rows.columns:
            _check_type(file, name, rows, dict, "a dict")


def check_prompt(prompt: Any, *, reads_pictures: bool) -> Messages:
    """Return the messages of a prompt.

    Raises DataError for a value that is no prompt, or that ends with an empty message. Warns once
    of a prompt that ends with an answer.
    """
    messages = without_picture_parts(prompt) if reads_pictures else as_messages(prompt)
    last = messages[-1]
    if last["role"] != "tool" and not _has_content(last):
        raise DataError(
            f"ends with an empty message, so there is nothing to answer: {str(last)[:80]}"
        )
    if last["role"] == "assistant":
        say_once(
            "A prompt ends with a message of the assistant. The model does not continue it: the "
            "chat template begins a further answer. Leave that message out if it is the solution.",
            logging.WARNING,
        )
    return messages


def _has_content(message: Message) -> bool:
    content = message.get("content")
    return bool(content.strip() if isinstance(content, str) else content)


def _check_type(file: str, column: str, rows: Rows, kind: type, expected: str) -> None:
    """Raise DataError for the first value of another class."""
    if rows.kinds(column) <= {kind, type(None)}:
        return
    for number, value in enumerate(rows.column(column)):
        if value is not None and not isinstance(value, kind):
            raise DataError(
                f"{file}, row {number}, column '{column}': must be {expected}, "
                f"got {type(value).__name__}: {str(value)[:80]!r}{way_to_convert(value)}."
            )


def _check_texts(file: str, column: str, rows: Rows) -> None:
    """Raise DataError for the first text that cannot be written as UTF-8; there are few texts."""
    for text in rows.distinct(column):
        try:
            check_text(text or "")
        except DataError as error:
            number = list(rows.column(column)).index(text)
            raise DataError(f"{file}, row {number}, column '{column}': {error}.") from error


def _kept_columns(sources: list[Rows], prompt_key: str) -> list[str]:
    """Return the columns of all files that an item has in addition to the prompt."""
    names = dict.fromkeys(chain.from_iterable(rows.columns for rows in sources))
    names.pop(prompt_key, None)

    for name in names:
        if name in _RESERVED:
            say_once(
                f"The data's column '{name}' is left out: training writes a column of that name."
            )
    return [name for name in names if name not in _RESERVED]
