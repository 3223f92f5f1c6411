"""DataProto: choose, cut, repeat and join the rows of a batch; pickle them."""

import itertools
import operator
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from verl.protocol.columns import BatchColumns, DataProtoConfig
from verl.utils.column_dicts import (
    Indices,
    cut_columns,
    join_numpy_dicts,
    join_tensor_dicts,
    row_numbers,
)
from verl.utils.errors import BatchError
from verl.utils.pickling import pack_tensor_dict, unpack_tensor_dict

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on


@dataclass(eq=False)
class DataProtoItem:
    """One row: tensors without the batch dimension, and objects.

    `batch` is None if there are no tensor columns.
    """

    batch: TensorDict = None  # pyright: ignore[reportAssignmentType]
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto(BatchColumns):
    """B rows of tensor columns (`batch`) and of numpy columns (`non_tensor_batch`).

    `batch` is None if there are no tensor columns.
    """

    def __getitem__(self, item: Any) -> Any:
        """Return a DataProtoItem for an int, or a DataProto for a slice, indices or a mask."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | tuple | range) or getattr(item, "ndim", 0) == 1:
            return self.select_idxs(item)

        row = operator.index(item)
        if not -len(self) <= row < len(self):  # an IndexError ends `for item in data`
            raise IndexError(f"Row {item} is not among {len(self)} rows.")
        tensors: Any = None if self.batch is None else self.batch[row]
        objects = {key: column[row] for key, column in self.non_tensor_batch.items()}
        return DataProtoItem(tensors, objects, self.meta_info)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle only the bytes of these rows.

        Tensors travel as numpy arrays, which protocol 5 hands over without a copy.
        """
        packed = pack_tensor_dict(self.batch)
        return _rebuild, (type(self), packed, self.non_tensor_batch, self.meta_info)

    def select_idxs(self, idxs: Indices) -> "Self":
        """Return the rows at integer `idxs`, in that order, or the rows where a mask is true.

        A row may be chosen several times.
        """
        index = row_numbers(idxs, len(self))
        array = index.numpy()

        def chosen(column: Any) -> Any:
            return column[index if isinstance(column, torch.Tensor) else array]

        return self._map(chosen, len(index))

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> "Self":
        """Return the rows `start:end:step`, as views of this batch if the step is positive."""
        rows = slice(start, end, step)
        numbers = range(len(self))[rows]
        if step is not None and step < 0:  # torch has no negative strides
            return self.select_idxs(numbers)
        return self._map(lambda column: column[rows], len(numbers))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict | None = None,
    ) -> Iterator["Self"]:
        """Iterate over mini-batches, `epochs` times over the batch.

        Args:
            mini_batch_size: rows of a mini-batch; must divide B.
            seed: of the orders that a shuffle draws.
            dataloader_kwargs: arguments of torch's DataLoader. {"shuffle": True} draws a new order
                for each epoch.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise BatchError(
                f"mini_batch_size must divide the {len(self)} rows of the batch, got "
                f"{mini_batch_size}."
            )
        if not len(self):  # a shuffling DataLoader refuses an empty data set
            return iter(())

        # The loader draws only row numbers, so a mini-batch is one gather, not a stack of rows.
        settings: dict[str, Any] = {"collate_fn": self.select_idxs, **(dataloader_kwargs or {})}
        # A loader without a generator draws from the global one, also if it does not shuffle.
        if seed is not None or not settings.get("shuffle"):
            settings["generator"] = torch.Generator().manual_seed(seed or 0)
        rows: Any = range(len(self))
        loader: Any = DataLoader(rows, batch_size=mini_batch_size, **settings)
        return itertools.chain.from_iterable(itertools.repeat(loader, epochs))

    def is_padding_enabled(self) -> bool:
        """Return whether this batch, or every batch of the process, may be cut unevenly."""
        return bool(
            self.meta_info.get(DataProtoConfig.auto_padding_key, False)
            or DataProtoConfig.auto_padding
        )

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Append `padding_size` copies of the "first" or the "last" (also "") row, in place."""
        if padding_candidate not in ("", "first", "last"):
            raise BatchError(
                f"padding_candidate must be 'first' or 'last', got '{padding_candidate}'."
            )
        if padding_size < 0 or (padding_size and not len(self)):
            raise BatchError(
                f"Cannot append {padding_size} copies of a row to a batch of {len(self)} rows."
            )
        row = 0 if padding_candidate == "first" else len(self) - 1
        copies = [row] * padding_size
        self.reorder([*range(len(self)), *copies])

    def chunk(self, chunks: int) -> list["Self"]:
        """Cut the batch into `chunks` pieces of equal size, in order.

        If padding is enabled, sizes may differ by one.
        """
        if chunks < 1:
            raise BatchError(f"chunks must be at least 1, got {chunks}.")
        if len(self) % chunks and not self.is_padding_enabled():
            raise BatchError(
                f"chunk needs a number of rows divisible by chunks, got {len(self)} rows and "
                f"{chunks} chunks. Pad with pad_dataproto_to_divisor, or build the batch with "
                "auto_padding=True."
            )

        size, longer = divmod(len(self), chunks)
        pieces: list[Self] = []
        start = 0
        for number in range(chunks):
            end = start + size + (number < longer)  # the first ones are longer
            pieces.append(self.slice(start, end))
            start = end
        return pieces

    def split(self, split_size: int) -> list["Self"]:
        """Cut the batch into pieces of `split_size` rows, in order; the last one may be smaller."""
        if split_size < 1:
            raise BatchError(f"split_size must be at least 1, got {split_size}.")
        starts = range(0, len(self), split_size)
        return [self.slice(start, start + split_size) for start in starts]

    @staticmethod
    def concat(data: list["DataProto"]) -> "DataProto":
        """Join batches with the same columns, one after the other.

        The result has the meta_info of the first batch.
        """
        if not data:
            raise BatchError("concat needs at least one DataProto, got an empty list.")

        first = data[0]
        for position, other in enumerate(data):
            differing = first._differences(other)
            if differing:
                raise BatchError(
                    f"concat needs the same columns in all batches; {position} differs from 0 in "
                    f"{sorted(differing)}."
                )

        batches = [piece.batch for piece in data]
        batch: Any = None
        if all(each is not None for each in batches):
            batch = join_tensor_dicts(batches)
        objects = join_numpy_dicts([piece.non_tensor_batch for piece in data])
        return type(first)(batch=batch, non_tensor_batch=objects, meta_info=dict(first.meta_info))

    def reorder(self, indices: Indices) -> None:
        """Put the rows into the order of `indices`, in place."""
        other = self.select_idxs(indices)
        self.batch = other.batch
        self.non_tensor_batch = other.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "Self":
        """Repeat each row: a,a,b,b when interleaved, else a,b,a,b."""
        try:
            times = operator.index(repeat_times)
        except TypeError:
            times = -1
        if times < 0:
            raise BatchError(
                f"repeat_times must be a whole number of at least 0, got {repeat_times!r}. "
                "sample_level_repeat takes a count for each row."
            )

        rows = np.arange(len(self))
        spread = np.repeat if interleave else np.tile
        return self.select_idxs(spread(rows, times))

    def sample_level_repeat(self, repeat_times: Indices) -> "Self":
        """Repeat row i `repeat_times[i]` times; copies of a row are neighbors."""
        times = np.asarray(repeat_times)
        is_whole = times.dtype.kind in "iu" or not times.size  # an empty list counts as floats
        if times.shape != (len(self),) or not is_whole or (times < 0).any():
            raise BatchError(
                f"repeat_times must be {len(self)} whole numbers, one a row and none negative, got "
                f"{times}."
            )
        return self.select_idxs(np.repeat(np.arange(len(self)), times.astype(np.int64)))

    def unfold_column_chunks(self, n_split: int, split_keys: list[str] | None = None) -> "Self":
        """Cut dimension 1 of the columns `split_keys` into `n_split` rows each.

        A column (B, n_split * k, ...) becomes (B * n_split, k, ...). An object column of lists of
        one length L counts as (B, L). All other columns are repeated to match; rows of one origin
        are neighbors.
        """
        columns = {**self._tensors(), **self.non_tensor_batch}
        cut = cut_columns(columns, split_keys or (), n_split)
        unfolded = self.repeat(n_split)
        for key, column in cut.items():
            if key in self.non_tensor_batch:
                unfolded.non_tensor_batch[key] = column
            else:
                unfolded.batch[key] = column
        return unfolded

    def save_to_disk(self, filepath: str | os.PathLike) -> None:
        """Write one file, atomically: a reader never sees half of it."""
        partial = Path(f"{os.fspath(filepath)}.partial")
        with partial.open("wb") as file:
            pickle.dump(self, file, protocol=5)
        partial.replace(filepath)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike) -> "DataProto":
        """Read a file of `save_to_disk`. It is a pickle: load only files that you trust."""
        try:
            with Path(filepath).open("rb") as file:
                data = pickle.load(file)
        except (pickle.UnpicklingError, EOFError) as error:
            raise BatchError(
                f"Expected a DataProto in '{filepath}', found no whole pickle ({error}). Write the "
                "file again with save_to_disk."
            ) from error

        if not isinstance(data, DataProto):
            raise BatchError(f"Expected a DataProto in '{filepath}', found {type(data).__name__}.")
        return data

    def _differences(self, other: "Self") -> set[Any]:
        """Return the columns that only one of two batches has, or that differ in size or kind."""
        by_size = self._columns().items() ^ other._columns().items()
        return by_size or self._tensors().keys() ^ other._tensors().keys()

    def _map(self, function: Callable[[Any], Any], rows: int, inner: Any = None) -> "Self":
        """Apply a function to every column.

        `rows` and `inner` are the batch sizes of the result; None keeps the inner ones.
        """
        batch: Any = self.batch
        if batch is not None:
            inner_sizes = batch.batch_size[1:] if inner is None else inner
            sizes = [rows, *inner_sizes]
            columns = {key: function(column) for key, column in batch.items()}
            batch = TensorDict(columns, batch_size=sizes, device=batch.device)
        objects = {key: function(column) for key, column in self.non_tensor_batch.items()}
        return type(self)(batch=batch, non_tensor_batch=objects, meta_info=dict(self.meta_info))


def _rebuild(kind: type[DataProto], packed: Any, objects: Any, meta: Any) -> DataProto:
    return kind(unpack_tensor_dict(packed), objects, meta)


# Queues and pipes of torch.multiprocessing keep torch's own reductions: tensors in shared memory
# travel as a handle.
ForkingPickler.register(
    DataProto, lambda data: (type(data), (data.batch, data.non_tensor_batch, data.meta_info))
)
