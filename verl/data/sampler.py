"""The order of rows in an epoch."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import numpy as np

from verl.protocol import DataProto
from verl.utils.user_parts import errors_of_method


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


class GuardedSampler:
    """Calls a sampler for a loader. Raises errors of a user's sampler with its class and line.

    Of the methods that a sampler may lack, `set_epoch` and `update` then do nothing.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.has_state = isinstance(sampler, StatefulSampler)
        # The order of another sampler may depend on the training so far.
        self.is_known_ahead = type(sampler) is SeededSampler

    def __len__(self) -> int:
        with self._errors_of("__len__"):
            return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        with self._errors_of("__iter__"):
            rows = iter(self.sampler)
        # A loader looks ahead on a copy, and a generator has none.
        return rows if self.is_known_ahead else self._each(rows)

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.sampler, EpochSampler):
            with self._errors_of("set_epoch"):
                self.sampler.set_epoch(epoch)

    def update(self, batch: DataProto) -> None:
        if isinstance(self.sampler, CurriculumSampler):
            with self._errors_of("update"):
                self.sampler.update(batch)

    def state_dict(self) -> dict[str, Any]:
        assert isinstance(self.sampler, StatefulSampler)
        with self._errors_of("state_dict"):
            return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state. Only an exit is named: an error may be due to another sampler's state."""
        assert isinstance(self.sampler, StatefulSampler)
        with self._errors_of("load_state_dict", lambda error: isinstance(error, Exception)):
            self.sampler.load_state_dict(state)

    def _each(self, rows: Iterator[int]) -> Iterator[int]:
        with self._errors_of("__iter__"):
            yield from rows

    def _errors_of(
        self,
        method: str,
        passes: Callable[[Exception | SystemExit], bool] = lambda error: False,
    ) -> AbstractContextManager[None]:
        return errors_of_method("sampler", self.sampler, method, passes)


def chosen_rows(total: int, num_rows: int, *, shuffle: bool, seed: int) -> np.ndarray:
    """Return the numbers of the first `num_rows` of `total` rows, or of a choice by the seed.

    They are in order. -1 chooses all.
    """
    if num_rows < 0 or num_rows >= total:
        return np.arange(total)
    if not shuffle:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(seed).choice(total, size=num_rows, replace=False))
