"""The order of rows in an epoch."""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from verl.protocol import DataProto


class Sampler(Protocol):
    """Iterating gives the row numbers of one epoch, `len()` how many they are.

    A user's own (curriculum) sampler is made as `Sampler(data_source=<dataset>,
    data_config=<DataConfig>)`. Rows are drawn batch by batch, never ahead, so it may look at what
    training did so far. To be resumed in mid-epoch, it either repeats its order (given the epoch)
    or has a state.
    """

    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int: ...


@runtime_checkable
class EpochSampler(Protocol):
    """A sampler that is told the number of each epoch before it begins (or a state from its middle
    is loaded)."""

    def set_epoch(self, epoch: int) -> None: ...


@runtime_checkable
class StatefulSampler(Protocol):
    """A sampler that, after `load_state_dict`, goes on with the rest of the epoch on the next
    iteration."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class CurriculumSampler(Protocol):
    """A sampler that is shown each trained batch, with its scores and advantages, before the next
    rows are drawn."""

    def update(self, batch: DataProto) -> None: ...


class SeededSampler:
    """All rows once an epoch: in order, or in a permutation that depends on the seed and the epoch
    alone."""

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
        return iter(
            np.random.default_rng([self.seed, self._epoch]).permutation(self.num_rows).tolist()
        )
