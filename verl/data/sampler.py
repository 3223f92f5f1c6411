"""The order of rows in an epoch."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from verl.protocol import DataProto


class Sampler(Protocol):
    """Iterates over the row numbers of one epoch; `len()` is their number.

    A user's sampler is created as `Sampler(data_source=<dataset>, data_config=<DataConfig>)`. Rows
    are drawn batch by batch, never ahead, so it may depend on the training so far. For a resume in
    mid-epoch, it either repeats its order (given the epoch) or has a state.
    """

    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int: ...


@runtime_checkable
class EpochSampler(Protocol):
    """A sampler that gets the number of each epoch.

    It gets it before the epoch begins, and before a state from the middle of the epoch is loaded.
    """

    def set_epoch(self, epoch: int) -> None: ...


@runtime_checkable
class StatefulSampler(Protocol):
    """A sampler with a state. After `load_state_dict`, it iterates over the rest of the epoch."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class CurriculumSampler(Protocol):
    """A sampler that gets each trained batch, with scores and advantages, before its next rows."""

    def update(self, batch: DataProto) -> None: ...


class SeededSampler:
    """All rows once per epoch, in order or in a permutation that seed and epoch determine."""

    def __init__(self, num_rows: int, *, shuffle: bool, seed: int) -> None:
        self.num_rows = num_rows
        self.shuffle = shuffle
        self.seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self.num_rows))
        generator = np.random.default_rng([self.seed, self._epoch])
        return iter(generator.permutation(self.num_rows).tolist())


def chosen_rows(total: int, num_rows: int, *, shuffle: bool, seed: int) -> np.ndarray:
    """Return the numbers of the first `num_rows` of `total` rows, or of a choice by the seed.

    They are in order. -1 chooses all.
    """
    if num_rows < 0 or num_rows >= total:
        return np.arange(total)
    if not shuffle:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(seed).choice(total, size=num_rows, replace=False))
