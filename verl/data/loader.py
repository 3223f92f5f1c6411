"""Batches of prompts, with a cursor that a resumed run gets back."""

import hashlib
import operator
from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from verl.data.collate import collate
from verl.data.sampler import (
    CurriculumSampler,
    EpochSampler,
    Sampler,
    SeededSampler,
    StatefulSampler,
)
from verl.protocol import DataProto
from verl.utils.errors import DataError


class MapDataset(Protocol):
    """What a loader needs of a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int) -> dict[str, Any]: ...


@runtime_checkable
class Fingerprinted(Protocol):
    """A dataset that can tell whether another one has the same rows in the same places."""

    @property
    def fingerprint(self) -> str: ...


class RLDataLoader:
    """Iterating gives batches up to the end of the epoch; iterating again gives the next epoch.

    The loader is a cursor. After `load_state_dict`, or after leaving a loop early, iterating goes
    on with the next batch. `state_dict()` between two batches counts every batch handed out as
    done. Raises DataError if not even one full batch fits the dataset (`drop_last`).
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
    ) -> None:
        """`sampler` replaces the order that `shuffle` and `seed` give."""
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.sampler: Sampler = sampler or SeededSampler(len(dataset), shuffle=shuffle, seed=seed)
        if batch_size < 1:
            raise DataError(f"A batch must have at least 1 prompt, got batch size {batch_size}.")

        if len(self.sampler) == 0:
            raise DataError(
                "The dataset, or the sampler, has no rows. Give data.train_files with rows."
            )

        if drop_last and batch_size > len(self.sampler):
            raise DataError(
                f"A batch of {batch_size} prompts does not fit a dataset of {len(self.sampler)}. "
                f"Lower data.train_batch_size to at most {len(self.sampler)}, or add data."
            )

        self._epoch = 0
        self._start_epoch()

    def __len__(self) -> int:
        """Batches an epoch."""
        rows = len(self.sampler)
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[DataProto]:
        epoch = self._epoch
        while self._epoch == epoch:
            rows = self._draw(min(self.batch_size, len(self.sampler) - self._taken))
            # The cursor moves on before the batch is out: a state taken while it is being used
            # counts it.
            self._leave_finished_epoch()
            yield collate([self.dataset[row] for row in rows])

    def tell_sampler(self, batch: DataProto) -> None:
        """Show a trained batch to a sampler that wants to know."""
        if isinstance(self.sampler, CurriculumSampler):
            self.sampler.update(batch)

    def state_dict(self) -> dict[str, Any]:
        """The cursor: a few numbers, whatever the size of the dataset."""
        state = {
            "epoch": self._epoch,
            "taken": self._taken,
            "order": self._order_digest,
            "num_rows": len(self.dataset),
            "fingerprint": self._fingerprint(),
        }
        if isinstance(self.sampler, StatefulSampler):
            state["sampler"] = self.sampler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken. DataError if the dataset or its order is another one."""
        here = (len(self.dataset), self._fingerprint())
        if here != (state["num_rows"], state["fingerprint"]):
            raise DataError(
                f"The checkpoint was made with another data set: {state['num_rows']} rows "
                f"(fingerprint {state['fingerprint']}), this one has {here[0]} ({here[1]}). Give "
                "the same files and the same data.max_prompt_length and filter, or start anew with "
                "trainer.resume_mode=disable."
            )

        self._epoch = state["epoch"]
        self._start_epoch()
        if isinstance(self.sampler, StatefulSampler):
            self._load_sampler(self.sampler, state)
            self._leave_finished_epoch()
            return

        if 0 < state["taken"] <= len(self.sampler):
            self._draw(state["taken"])
        if self._order_digest != state["order"]:
            raise DataError(
                f"The first {state['taken']} rows of epoch {state['epoch']} come in another order "
                "than in the checkpoint. Resume with the same data.seed, data.shuffle and sampler; "
                "a sampler of your own needs a fixed order per epoch, or state_dict and "
                "load_state_dict."
            )

        self._leave_finished_epoch()

    def _leave_finished_epoch(self) -> None:
        """Go to the next epoch where this one has no further batch (of this size: a resumed run may
        change it)."""
        if len(self.sampler) - self._taken < (self.batch_size if self.drop_last else 1):
            self._epoch += 1
            self._start_epoch()

    def _start_epoch(self) -> None:
        # The sampler is asked at the first draw: it may look at what the last batch of the epoch
        # before taught.
        self._rows: Iterator[int] | None = None
        self._taken = 0
        self._order_digest = ""

    def _load_sampler(self, sampler: StatefulSampler, state: dict[str, Any]) -> None:
        # an epoch that has not begun begins at the first draw, as in the undisturbed run
        if state["taken"] == 0:
            sampler.load_state_dict(state["sampler"])
            return
        self._tell_epoch()
        sampler.load_state_dict(state["sampler"])
        self._rows = iter(self.sampler)
        self._taken = state["taken"]
        self._order_digest = state["order"]

    def _tell_epoch(self) -> None:
        if isinstance(self.sampler, EpochSampler):
            self.sampler.set_epoch(self._epoch)

    def _draw(self, count: int) -> list[int]:
        """The next `count` row numbers of this epoch, written into the digest of its order."""
        if self._rows is None:
            self._tell_epoch()
            self._rows = iter(self.sampler)

        rows = []
        for row in islice(self._rows, count):
            try:
                rows.append(operator.index(row))
            except TypeError as error:
                raise DataError(
                    f"The sampler gave the row {row!r}, which is no whole number."
                ) from error

        if len(rows) < count:
            raise DataError(
                f"The sampler has len() {len(self.sampler)} but gave {self._taken + len(rows)} "
                "rows. They must agree."
            )

        for row in rows:
            if not 0 <= row < len(self.dataset):
                raise DataError(
                    f"The sampler gave row {row} of a dataset of {len(self.dataset)} rows."
                )
            chained = self._order_digest.encode() + row.to_bytes(8, "little")
            self._order_digest = hashlib.blake2b(chained, digest_size=8).hexdigest()

        self._taken += count
        return rows

    def _fingerprint(self) -> str | None:
        return self.dataset.fingerprint if isinstance(self.dataset, Fingerprinted) else None
