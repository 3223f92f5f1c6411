"""Iterate over batches of prompts, with a cursor that a resumed run restores."""

import copy
import hashlib
import operator
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

from verl.data.collate import collate
from verl.data.own_rows import PromptLimit, fingerprint_of, read_rows
from verl.data.row_processes import Draw, RowProcesses
from verl.data.sampler import GuardedSampler, Sampler, SeededSampler
from verl.protocol import DataProto
from verl.utils.arithmetic import ceil_div
from verl.utils.errors import DataError


class MapDataset(Protocol):
    """A dataset of rows by number, as a loader needs it."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int) -> dict[str, Any]: ...


class RLDataLoader:
    """Iterate over the batches of an epoch; iterating again yields the next epoch.

    The loader is a cursor. After `load_state_dict`, or after leaving a loop early, iteration
    continues with the next batch. `state_dict()` counts every yielded batch as done. Raises
    DataError if the dataset is smaller than one batch (`drop_last`).
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool = True,
        sampler: Sampler | None = None,
        encode: Callable[[Any], list[int]] | None = None,
        prompt_key: str = "prompt",
        num_workers: int = 0,
        workers_key: str = "data.dataloader_num_workers",
        limit: PromptLimit | None = None,
    ) -> None:
        """Set the order of the rows: that of `sampler`, or else of `shuffle` and `seed`.

        `encode` gives the token ids of items that have messages alone, which may be under
        `prompt_key`; see `collate`. With `num_workers`, so many processes read the rows, see
        `RowProcesses`; `workers_key` names it in errors. They read a batch ahead, unless `sampler`
        is one of the user's. `limit` cuts or refuses longer prompts of a drawn batch.
        """
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.encode = encode
        self.prompt_key = prompt_key
        self.limit = limit
        # called with the numbers and items of every batch, for the record of the run
        self.on_drawn: Callable[[list[int], list[dict[str, Any]]], None] | None = None
        if batch_size < 1:
            raise DataError(f"A batch must have at least 1 row, got batch size {batch_size}.")
        if sampler is None:
            sampler = SeededSampler(len(dataset), shuffle=shuffle, seed=seed)
        self.order_by(sampler)

        self._processes: RowProcesses | None = None
        if num_workers > 0:
            self._processes = RowProcesses(dataset, num_workers, seed=seed, key=workers_key)

    def order_by(self, sampler: Sampler) -> None:
        """Draw the rows in the order of `sampler`, and begin with its first epoch.

        Raises DataError if it has too few rows for a batch.
        """
        order = GuardedSampler(sampler)
        num_rows = len(order)
        if num_rows == 0:
            raise DataError(
                "The dataset, or the sampler, has no rows. Give data.train_files with rows."
            )
        if self.drop_last and self.batch_size > num_rows:
            raise DataError(
                f"A batch of {self.batch_size} rows does not fit a dataset of {num_rows}. "
                f"Lower data.train_batch_size to at most {num_rows}, or add data."
            )

        self._order = order
        self._epoch = 0
        self._start_epoch()

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        rows = len(self._order)
        if self.drop_last:
            return rows // self.batch_size
        return ceil_div(rows, self.batch_size)

    @property
    def sampler(self) -> Sampler:
        """Return the sampler, see `order_by`."""
        return self._order.sampler

    @property
    def drawn_epoch(self) -> int:
        """Return the epoch, from 0, of the batch that was yielded last; 0 before the first."""
        # The cursor has left a finished epoch already, and has taken nothing of the next one.
        return self._epoch if self._taken else max(self._epoch - 1, 0)

    def __iter__(self) -> Iterator[DataProto]:
        epoch = self._epoch
        while self._epoch == epoch:
            taken = self._taken
            draw = Draw(epoch, taken, self._draw(self._next_size()))
            # Move the cursor before the batch is yielded, so that a state that is taken while the
            # batch is in use counts it.
            self._leave_finished_epoch()
            items = self._items(draw)
            if self.on_drawn is not None:
                self.on_drawn(draw.rows, items)
            batch = collate(items, self.encode, self.prompt_key)
            if self.limit is not None:
                self.limit.fit(batch, items, draw.rows)
            yield batch

    def close(self) -> None:
        """End the processes that read rows. Iteration goes on as before, with others."""
        if self._processes is not None:
            self._processes.close()

    def update_sampler(self, batch: DataProto) -> None:
        """Pass a trained batch to a curriculum sampler."""
        self._order.update(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: a few numbers, for a dataset of any size."""
        state = {
            "epoch": self._epoch,
            "taken": self._taken,
            "order": self._order_digest,
            "num_rows": len(self.dataset),
            "fingerprint": fingerprint_of(self.dataset),
        }
        if self._order.has_state:
            state["sampler"] = self._order.state_dict()
        return state

    def has_rows_of(self, state: dict[str, Any]) -> bool:
        """Return whether `state` was saved with the rows of this dataset."""
        saved = (state["num_rows"], state["fingerprint"])
        return saved == (len(self.dataset), fingerprint_of(self.dataset))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to the position of `state`.

        Raises DataError if the dataset or its order differs from that of the checkpoint.
        """
        if not self.has_rows_of(state):
            raise DataError(
                f"The checkpoint was made with another data set: {state['num_rows']} rows "
                f"(fingerprint {state['fingerprint']}), this one has {len(self.dataset)} "
                f"({fingerprint_of(self.dataset)}). Give the same files, tokenizer, limit of "
                "length and filter; or go on with this data set from its first batch with "
                "trainer.resume_mode=resume_path trainer.resume_from_path=<the checkpoint>; or "
                "start over with trainer.resume_mode=disable."
            )

        self._epoch = state["epoch"]
        self._start_epoch()
        if self._order.has_state:
            self._load_sampler(state)
            self._leave_finished_epoch()
            return

        if 0 < state["taken"] <= len(self._order):
            self._draw(state["taken"])
        if self._order_digest != state["order"]:
            raise DataError(
                f"The first {state['taken']} rows of epoch {state['epoch']} come in another order "
                "than in the checkpoint. Resume with the same data.seed, data.shuffle and sampler; "
                "a sampler of your own needs a fixed order per epoch, or state_dict and "
                "load_state_dict."
            )

        self._leave_finished_epoch()

    def _items(self, draw: Draw) -> list[dict[str, Any]]:
        if self._processes is None:
            return read_rows(self.dataset, draw.rows)
        following = self._next_draw() if self._order.is_known_ahead else None
        return self._processes.items(draw, following)

    def _next_draw(self) -> Draw:
        """Return the next batch without moving the cursor."""
        # A copy of the iterator of a list or a range has a position of its own.
        rows = islice(copy.copy(self._rows_left()), self._next_size())
        return Draw(self._epoch, self._taken, list(rows))

    def _next_size(self) -> int:
        return min(self.batch_size, len(self._order) - self._taken)

    def _leave_finished_epoch(self) -> None:
        """Move to the next epoch if this one has no further batch.

        That depends on the batch size, which a resumed run may change.
        """
        fewest_rows = self.batch_size if self.drop_last else 1
        if len(self._order) - self._taken < fewest_rows:
            self._epoch += 1
            self._start_epoch()

    def _start_epoch(self) -> None:
        # Ask the sampler for rows at the first draw: its order may depend on the results of the
        # last batch of the previous epoch.
        self._rows: Iterator[int] | None = None
        self._taken = 0
        self._order_digest = ""

    def _load_sampler(self, state: dict[str, Any]) -> None:
        # An epoch that has not begun starts at the first draw, as in an uninterrupted run.
        if state["taken"] == 0:
            self._order.load_state_dict(state["sampler"])
            return

        self._order.set_epoch(self._epoch)
        self._order.load_state_dict(state["sampler"])
        self._rows = iter(self._order)
        self._taken = state["taken"]
        self._order_digest = state["order"]

    def _rows_left(self) -> Iterator[int]:
        """Return the rows of the epoch that are still to come."""
        if self._rows is None:
            self._order.set_epoch(self._epoch)
            self._rows = iter(self._order)
        return self._rows

    def _draw(self, count: int) -> list[int]:
        """Return the next `count` row numbers, and add them to the digest of the epoch's order."""
        rows = []
        for row in islice(self._rows_left(), count):
            try:
                rows.append(operator.index(row))
            except TypeError as error:
                raise DataError(
                    f"The sampler gave the row {row!r}, which is not an integer. It must give "
                    f"numbers of rows, from 0 to {len(self.dataset) - 1}."
                ) from error

        if len(rows) < count:
            given = self._taken + len(rows)
            raise DataError(
                f"The sampler has len() {len(self._order)} but gave {given} rows. They must agree."
            )

        for row in rows:
            if not 0 <= row < len(self.dataset):
                raise DataError(
                    f"The sampler gave row {row} of a dataset of {len(self.dataset)} rows. It must "
                    f"give numbers of rows, from 0 to {len(self.dataset) - 1}."
                )
            chained = self._order_digest.encode() + row.to_bytes(8, "little")
            self._order_digest = hashlib.blake2b(chained, digest_size=8).hexdigest()

        self._taken += count
        return rows
