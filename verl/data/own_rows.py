"""Read the rows of a user's own data set, and hold their prompts to the limit of tokens."""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from verl.config import DataConfig
from verl.data.collate import prompt_ids
from verl.data.files import errors_at
from verl.data.prompt_limit import all_too_long, fit_prompt, rows_to_keep
from verl.data.rl_dataset import RLDataset
from verl.protocol import DataProto
from verl.utils.column_dicts import object_column
from verl.utils.errors import DataError, VerlError
from verl.utils.logging import logger
from verl.utils.seeding import restore_rng_state, rng_state
from verl.utils.sigterm import raised_by_signal
from verl.utils.user_parts import errors_of_dataset, errors_of_method, read_row

Items = list[dict[str, Any]]

# Seconds in which rows are measured at start where none is dropped. A data set may make millions of
# rows, or read each from a network.
MEASURED_S = 2.0
CHUNK = 64  # rows that are in memory at once while they are measured


def read_rows(dataset: Any, rows: Sequence[int]) -> Items:
    """Return the items of some rows, together if the data set has torch's `__getitems__`.

    Raises DataError with the row and the class for an error that is not one of this package, and
    for another number of items than of rows.
    """
    several = getattr(dataset, "__getitems__", None)
    if several is None:
        return [read_row(dataset, row) for row in rows]

    try:
        items = several(rows)
    except VerlError:
        raise
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        if isinstance(error, SystemExit) and raised_by_signal(error):
            raise
        for row in rows:
            read_row(dataset, row)  # raises for the row that failed
        with errors_of_dataset(dataset, f"{len(rows)} rows"):  # each of them can be read alone
            raise error

    if len(items) != len(rows):
        raise DataError(
            f"__getitems__ of the data set '{type(dataset).__name__}' must return an item for each "
            f"row, got {len(items)} for {len(rows)} rows."
        )
    return items


def count_rows(dataset: Any) -> int:
    """Return the length of a data set. Raises DataError with its class for an error of a user's."""
    with errors_of_method("data set", dataset, "__len__"):
        return len(dataset)


@runtime_checkable
class Fingerprinted(Protocol):
    """A dataset with a digest, which is equal for datasets with the same rows in the same order."""

    @property
    def fingerprint(self) -> str: ...


def fingerprint_of(dataset: Any) -> str | None:
    """Return the digest of a data set, None without one. Raises DataError as `count_rows` does."""
    with errors_of_method("data set", dataset, "fingerprint"):
        return dataset.fingerprint if isinstance(dataset, Fingerprinted) else None


class KeptRows:
    """The rows of a data set whose prompts are not too long, in their order."""

    def __init__(self, origin: Any, numbers: list[int]) -> None:
        """Keep the rows `numbers` of `origin`, the data set of the user."""
        self.origin = origin
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, item: int) -> Any:
        return read_row(self.origin, self.numbers[item])

    def __getitems__(self, items: Sequence[int]) -> Items:
        return read_rows(self.origin, [self.numbers[item] for item in items])

    @property
    def fingerprint(self) -> str:
        """Return that of the data set, if it has any, with a digest of the kept rows."""
        of_all = fingerprint_of(self.origin) or ""
        kept = np.array(self.numbers, dtype="<i8").tobytes()
        return f"{of_all} {hashlib.blake2b(kept, digest_size=16).hexdigest()}"


def origin_of(dataset: Any) -> Any:
    """Return the data set of the user, without the choice of `KeptRows`."""
    return dataset.origin if isinstance(dataset, KeptRows) else dataset


class _Measured(NamedTuple):
    lengths: np.ndarray  # (rows,) tokens of each prompt
    pictured: np.ndarray  # (rows,) whether it has pictures


class PromptLimit:
    """The most tokens of a prompt in data sets that are not read from files.

    `RLDataset` measures the prompts of files itself.

    Args:
        name: how the user names the data set, for errors.
        data: the limit, and whether longer prompts are dropped, cut or an error.
        encode: gives the token ids of items that have messages alone, see `collate`.
        reads_pictures: whether rows may have pictures. A prompt with pictures is never cut.
    """

    def __init__(
        self,
        name: str,
        data: DataConfig,
        encode: Callable[[Any], list[int]],
        *,
        reads_pictures: bool = False,
    ) -> None:
        self.name = name
        self.data = data
        self.encode = encode
        self.reads_pictures = reads_pictures

    def keep(self, dataset: Any) -> Any:
        """Return the data set; without its longer prompts if `data.filter_overlong_prompts` is set.

        Reads the rows once, unless longer prompts are cut: all rows if some may be dropped, else
        those that two seconds are enough for. `fit` finds the others when they are drawn. Raises
        DataError for a row that is too long, or has no prompt.
        """
        drops = self.data.filter_overlong_prompts
        if isinstance(dataset, RLDataset):
            return dataset
        if self._cuts and not drops and not self.reads_pictures:
            return dataset

        lengths, pictured = self._measure(dataset, math.inf if drops else MEASURED_S)
        numbers = rows_to_keep(self.name, lengths, pictured, self.data, several="of the rows")
        if len(numbers) == len(lengths):
            return dataset
        if len(numbers) == 0:
            raise all_too_long(self.name, self.data)
        return KeptRows(dataset, numbers.tolist())

    def fit(self, batch: DataProto, items: Items, rows: Sequence[int]) -> None:
        """Cut the longer prompts of a batch (B,), where `data.truncation` allows it.

        Args:
            batch: with the column `raw_prompt_ids`, which changes.
            items: of the batch, as the data set gave them.
            rows: their numbers.

        Raises DataError with the row for a prompt that must not be cut.
        """
        limit = self.data.max_prompt_length
        prompts = batch.non_tensor_batch["raw_prompt_ids"]
        if max(map(len, prompts)) <= limit:
            return

        fitted = []
        for ids, item, row in zip(prompts, items, rows):
            if len(ids) > limit:
                ids = self._cut(ids, item, row)
            fitted.append(ids)
        batch.non_tensor_batch["raw_prompt_ids"] = object_column(fitted)

    @property
    def _cuts(self) -> bool:
        return self.data.truncation != "error"

    def _cut(self, ids: list[int], item: dict[str, Any], row: int) -> list[int]:
        """Return the ids of a drawn prompt over the limit, cut to it. Raises DataError as `fit`."""
        place = f"{self.name}, row {row}"
        pictured = _has_pictures(item)
        if self.data.filter_overlong_prompts and (pictured or not self._cuts):
            raise DataError(
                f"{place}: the prompt has {len(ids)} tokens, data.max_prompt_length allows "
                f"{self.data.max_prompt_length}. It was shorter when data.filter_overlong_prompts "
                "measured it at start. Raise the limit, or give the same prompt whenever the row "
                "is read."
            )
        return fit_prompt(ids, self.data, place, pictured=pictured, whose=f"{self.name}: prompts")

    def _measure(self, dataset: Any, most_s: float) -> _Measured:
        """Measure all rows, or the first ones until `most_s` seconds are over.

        Keeps the random states, which a data set may draw from.
        """
        total = len(dataset)
        start = time.perf_counter()
        states = rng_state()

        lengths = []
        pictured = []
        for first in range(0, total, CHUNK):
            numbers = range(first, min(first + CHUNK, total))
            for number, item in zip(numbers, read_rows(dataset, list(numbers))):
                with errors_at(f"{self.name}, row {number}"):
                    ids = prompt_ids(item, self.encode, self.data.prompt_key)
                lengths.append(len(ids))
                pictured.append(_has_pictures(item))
            if time.perf_counter() - start >= most_s:
                break

        restore_rng_state(states)
        seconds = time.perf_counter() - start
        if seconds >= 1.0:
            logger.info(
                "Measured %s prompts of %s in %.1f s.", f"{len(lengths):,}", self.name, seconds
            )
        return _Measured(np.array(lengths), np.array(pictured))


def _has_pictures(item: dict[str, Any]) -> bool:
    return bool(item.get("prepared_pictures"))
