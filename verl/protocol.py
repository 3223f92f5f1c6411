"""DataProto: a batch of tensors, object columns and meta entries that crosses process borders.

B is the number of rows, as in `verl/columns.py`. A method works in place if its docstring says so.
Any other method returns a new DataProto, which shares memory with this one where views allow it.
A wrong argument raises BatchError (a ValueError, and an AssertionError as in verl 0.5), which names
the columns.
"""

import copy
import itertools
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.utils.data import DataLoader

from verl.utils.column_dicts import (
    Indices,
    cut_columns,
    join_numpy_dicts,
    join_tensor_dicts,
    leading_sizes,
    object_bytes,
    object_column,
    row_numbers,
    tensor_bytes,
    tensors_and_arrays,
    union_dict,
    union_numpy_dict,
    union_tensor_dict,
)
from verl.utils.errors import BatchError
from verl.utils.lazy import lazy_names
from verl.utils.pickling import pack_tensor_dict, unpack_tensor_dict
from verl.utils.units import MIB

Keys: TypeAlias = Sequence[str] | None


class DataProtoConfig:
    """Settings of all batches in this process."""

    auto_padding: bool = False  # every batch may be cut into uneven chunks and padded on dispatch
    auto_padding_key = "_verl_auto_padding"  # in meta_info: the same for one batch


@dataclass(eq=False)
class DataProtoItem:
    """One row: tensors without the batch dimension, and objects.

    `batch` is None if there are no tensor columns.
    """

    batch: TensorDict = None  # pyright: ignore[reportAssignmentType]
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DataProto:
    """B rows of tensor columns (`batch`) and of numpy columns (`non_tensor_batch`).

    `batch` is None if there are no tensor columns.
    """

    batch: TensorDict = None  # pyright: ignore[reportAssignmentType]
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.non_tensor_batch is None:
            self.non_tensor_batch = {}
        if self.meta_info is None:
            self.meta_info = {}
        self.check_consistency()

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        for column in self.non_tensor_batch.values():
            return len(column)
        return 0

    def __getitem__(self, item: Any) -> Any:
        """Return a DataProtoItem for an int, or a DataProto for a slice, indices or a mask."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | tuple | range) or getattr(item, "ndim", 0) == 1:
            return self.select_idxs(item)

        row = range(len(self))[item]  # IndexError ends `for item in data`
        tensors: Any = None if self.batch is None else self.batch[row]
        objects = {key: column[row] for key, column in self.non_tensor_batch.items()}
        return DataProtoItem(tensors, objects, self.meta_info)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle only the bytes of these rows.

        Tensors travel as numpy arrays, which protocol 5 hands over without a copy.
        """
        packed = pack_tensor_dict(self.batch)
        return _rebuild, (type(self), packed, self.non_tensor_batch, self.meta_info)

    def check_consistency(self) -> None:
        """Raise BatchError unless all columns have the same number of rows."""
        dims = 1 if self.batch is None else len(self.batch.batch_size)
        if dims < 1 or (dims > 1 and self.non_tensor_batch):
            raise BatchError(
                f"A batch has one row dimension, or several without object columns; got {dims} and "
                f"object columns {list(self.non_tensor_batch)}. unfold_batch_dim flattens a batch."
            )

        for key, column in self.non_tensor_batch.items():
            is_array = isinstance(column, np.ndarray) and column.ndim > 0
            if not is_array or len(column) != len(self):
                fact = f"{len(column)} rows" if is_array else type(column).__name__
                raise BatchError(
                    f"Object column '{key}' must be a numpy array of {len(self)} rows like the "
                    f"others, got {fact}. from_dict(non_tensors=...) makes an array of a list."
                )

    @classmethod
    def from_single_dict(
        cls, data: dict[str, Any], meta_info: dict | None = None, auto_padding: bool = False
    ):
        """Put tensors into `batch` and numpy arrays into `non_tensor_batch`.

        Raises BatchError for a column that is neither.
        """
        tensors, objects = tensors_and_arrays(data)
        return cls.from_dict(tensors, objects, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> "DataProto":
        """Make a batch of columns by name. Lists become 1-D object arrays.

        Args:
            num_batch_dims: how many leading sizes are the same in all tensors.
            auto_padding: whether the batch may be cut into uneven chunks.
        """
        columns: Any = dict(tensors or {})
        batch: Any = None
        if columns:
            batch = TensorDict(columns, leading_sizes(columns, num_batch_dims))

        objects: dict[str, np.ndarray] = {}
        for key, column in (non_tensors or {}).items():
            objects[key] = column if isinstance(column, np.ndarray) else object_column(column)

        meta = dict(meta_info or {})
        if auto_padding:
            meta[DataProtoConfig.auto_padding_key] = True
        return cls(batch=batch, non_tensor_batch=objects, meta_info=meta)

    @classmethod
    def from_tensordict(cls, tensor_dict: TensorDict) -> "DataProto":
        """Make a batch of a TensorDict with tensors, stacks of objects, and single objects.

        Each becomes a tensor column, an object column (B,), or an entry of meta_info.
        """
        tensors: Any = {}
        objects: dict[str, np.ndarray] = {}
        meta: dict[str, Any] = {}
        keys: Any = tensor_dict.keys()
        for key in keys:
            value: Any = tensor_dict.get(key)
            if isinstance(value, NonTensorStack):
                objects[key] = object_column(value.tolist())
            elif isinstance(value, NonTensorData):
                meta[key] = value.data
            else:
                tensors[key] = value

        batch: Any = None
        if tensors:
            batch = TensorDict(tensors, tensor_dict.batch_size, device=tensor_dict.device)
        return cls(batch, objects, meta)

    def to_tensordict(self) -> TensorDict:
        """Return all columns and meta entries as one TensorDict; see `from_tensordict`."""
        entries: Any = self._tensors()
        shared = self.meta_info.keys() & {*entries, *self.non_tensor_batch}
        if shared:
            raise BatchError(
                f"A TensorDict has one entry of each name, but {sorted(shared)} are columns and "
                "meta_info. Rename the columns."
            )
        for key, column in self.non_tensor_batch.items():
            entries[key] = NonTensorStack(*column)
        for key, value in self.meta_info.items():
            entries[key] = NonTensorData(value)

        if self.batch is None:
            return TensorDict(entries, [len(self)])
        return TensorDict(entries, self.batch.batch_size, device=self.batch.device)

    def to(self, device: Any) -> "DataProto":
        """Move the tensors to `device`, in place, and return self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
        deepcopy=False,
    ) -> "DataProto":
        """Return the named columns and meta entries; None selects all.

        Tensors are shared unless `deepcopy`.
        """
        self._require(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())

        batch: Any = None
        if self.batch is not None:
            batch = self.batch.select(*_pick(self._tensors(), batch_keys))
        objects = _pick(self.non_tensor_batch, non_tensor_batch_keys)
        meta = _pick(self.meta_info, meta_info_keys)

        selected = type(self)(batch=batch, non_tensor_batch=objects, meta_info=meta)
        return copy.deepcopy(selected) if deepcopy else selected

    def select_idxs(self, idxs: Indices) -> "DataProto":
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
    ) -> "DataProto":
        """Return the rows `start:end:step`, as views of this batch if the step is positive."""
        rows = slice(start, end, step)
        numbers = range(len(self))[rows]
        if step is not None and step < 0:  # torch has no negative strides
            return self.select_idxs(numbers)
        return self._map(lambda column: column[rows], len(numbers))

    def pop(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
    ) -> "DataProto":
        """Remove the named columns and meta entries, in place, and return them; None names none."""
        tensor_keys = dict.fromkeys(batch_keys or ())
        object_keys = dict.fromkeys(non_tensor_batch_keys or ())
        meta_keys = dict.fromkeys(meta_info_keys or ())
        # Check all names before the first column leaves the batch.
        self._require(list(tensor_keys), list(object_keys), list(meta_keys))

        batch: Any = self.batch
        tensors = {key: batch.pop(key) for key in tensor_keys}
        objects = {key: self.non_tensor_batch.pop(key) for key in object_keys}
        meta = {key: self.meta_info.pop(key) for key in meta_keys}
        return type(self).from_dict(tensors, objects, meta)

    def rename(self, old_keys: Any = None, new_keys: Any = None) -> "DataProto":
        """Rename columns, in place, and return self. Each argument is a name or a list of names."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys or ())
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys or ())
        known = self._columns()
        names = dict(zip(old, new))

        is_paired = len(old) == len(new)
        are_known = set(old) <= set(known)
        stay_different = len(_renamed(known, names)) == len(known)
        if not (is_paired and are_known and stay_different):
            raise BatchError(
                f"Cannot rename {old} to {new}: columns are {list(known)}, and names must stay "
                "different."
            )

        if self.batch is not None:
            tensors: Any = _renamed(self._tensors(), names)
            sizes = self.batch.batch_size
            self.batch = TensorDict(tensors, batch_size=sizes, device=self.batch.device)
        self.non_tensor_batch = _renamed(self.non_tensor_batch, names)
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Add the columns and meta entries of `other`, in place, and return self.

        A key of both batches must have equal values.
        """
        both = type(self)(  # checked as a whole before this batch changes
            batch=union_tensor_dict(self.batch, other.batch),
            non_tensor_batch=union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch),
            meta_info=union_dict(self.meta_info, other.meta_info, "meta_info"),
        )
        self.batch = both.batch
        self.non_tensor_batch = both.non_tensor_batch
        self.meta_info = both.meta_info
        return self

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict | None = None,
    ) -> Iterator["DataProto"]:
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

    def chunk(self, chunks: int) -> list["DataProto"]:
        """Cut the batch into `chunks` pieces of equal size, in order.

        If padding is enabled, sizes may differ by one.
        """
        if chunks < 1 or (len(self) % chunks and not self.is_padding_enabled()):
            raise BatchError(
                f"chunk needs a number of rows divisible by chunks, got {len(self)} rows and "
                f"{chunks} chunks. Pad with pad_dataproto_to_divisor, or build the batch with "
                "auto_padding=True."
            )

        size, longer = divmod(len(self), chunks)
        pieces: list[DataProto] = []
        start = 0
        for number in range(chunks):
            end = start + size + (number < longer)  # the first ones are longer
            pieces.append(self.slice(start, end))
            start = end
        return pieces

    def split(self, split_size: int) -> list["DataProto"]:
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

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Repeat each row: a,a,b,b when interleaved, else a,b,a,b."""
        if repeat_times < 0:
            raise BatchError(f"repeat_times must not be negative, got {repeat_times}.")
        rows = np.arange(len(self))
        spread = np.repeat if interleave else np.tile
        return self.select_idxs(spread(rows, repeat_times))

    def sample_level_repeat(self, repeat_times: Indices) -> "DataProto":
        """Repeat row i `repeat_times[i]` times; copies of a row are neighbors."""
        times = np.asarray(repeat_times, dtype=np.int64)
        if times.shape != (len(self),) or (times < 0).any():
            raise BatchError(
                f"repeat_times must be {len(self)} counts, one a row and none negative, got "
                f"{times}."
            )
        return self.select_idxs(np.repeat(np.arange(len(self)), times))

    def unfold_column_chunks(
        self, n_split: int, split_keys: list[str] | None = None
    ) -> "DataProto":
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
        with Path(filepath).open("rb") as file:
            data = pickle.load(file)
        if not isinstance(data, DataProto):
            raise BatchError(f"Expected a DataProto in '{filepath}', found {type(data).__name__}.")
        return data

    def print_size(self, prefix: str = "") -> None:
        """Print the number of rows and MiB. Objects count without those that they refer to."""
        tensor_mib = tensor_bytes(self._tensors()) / MIB
        object_mib = object_bytes(self.non_tensor_batch) / MIB
        sizes = f"{tensor_mib:.3f} MiB of tensors, {object_mib:.3f} MiB of objects"
        print(f"{prefix}{len(self)} rows, {sizes}", flush=True)

    def get_data_info(self) -> str:
        """Return lines with sizes and types of columns, and types of meta entries."""
        lines = [f"{len(self)} rows"]
        for key, column in {**self._tensors(), **self.non_tensor_batch}.items():
            lines.append(f"{key}: {tuple(column.shape)} {column.dtype}")
        for key, value in self.meta_info.items():
            lines.append(f"meta_info['{key}']: {type(value).__name__}")
        return "\n".join(lines)

    def _tensors(self) -> dict[str, Any]:
        if self.batch is None:
            return {}
        return dict(self.batch.items())  # pyright: ignore[reportReturnType]

    def _columns(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes of every column after the row dimension."""
        columns = {**self._tensors(), **self.non_tensor_batch}
        return {key: tuple(column.shape[1:]) for key, column in columns.items()}

    def _differences(self, other: "DataProto") -> set[Any]:
        """Return the columns that only one of two batches has, or that differ in size or kind."""
        by_size = self._columns().items() ^ other._columns().items()
        return by_size or self._tensors().keys() ^ other._tensors().keys()

    def _require(self, *wanted: Sequence[str]) -> None:
        """Raise BatchError unless the tensor columns, object columns and meta entries exist."""
        kinds = ("tensor column", "object column", "meta_info")
        homes = (self._tensors(), self.non_tensor_batch, self.meta_info)
        for kind, keys, home in zip(kinds, wanted, homes):
            missing = [key for key in keys if key not in home]
            if missing:
                raise BatchError(
                    f"No {kind} {missing} in this DataProto; there are {sorted(home)}."
                )

    def _map(self, function: Callable[[Any], Any], rows: int, inner: Any = None) -> "DataProto":
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


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows until `size_divisor` divides B; return the padded batch and their number.

    The appended rows are copies, from the first row on.
    """
    if size_divisor < 1:
        raise BatchError(f"size_divisor must be at least 1, got {size_divisor}.")
    pad_size = -len(data) % size_divisor
    if not pad_size:
        return data, 0
    rows = np.arange(len(data) + pad_size) % len(data)
    return data.select_idxs(rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise BatchError(
            f"pad_size must lie between 0 and the {len(data)} rows of the batch, got {pad_size}."
        )
    return data.slice(0, len(data) - pad_size) if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Reshape every column from (B, ...) to (new_batch_size, B / new_batch_size, ...)."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise BatchError(
            f"new_batch_size must divide the {len(data)} rows of the batch, got {new_batch_size}."
        )
    sizes = (new_batch_size, len(data) // new_batch_size)

    def folded(column: Any) -> Any:
        return column.reshape(*sizes, *column.shape[1:])

    return data._map(folded, new_batch_size, inner=())


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Reshape every column from (b_1, ..., b_k, ...) to (b_1 * ... * b_k, ...), k = `batch_dims`.

    This undoes `fold_batch_dim`.
    """
    columns = {**data._tensors(), **data.non_tensor_batch}
    rows = math.prod(leading_sizes(columns, batch_dims))

    def unfolded(column: Any) -> Any:
        return column.reshape(rows, *column.shape[batch_dims:])

    return data._map(unfolded, rows, inner=())


def collate_fn(x: list[DataProtoItem]) -> DataProto:
    """Join rows to a batch without meta_info, for a DataLoader over a DataProto."""
    if not x:
        raise BatchError("collate_fn needs at least one row, got an empty list.")
    batch: Any = None
    if x[0].batch is not None:
        batch = torch.stack([item.batch for item in x])  # pyright: ignore

    objects: dict[str, np.ndarray] = {}
    for key in x[0].non_tensor_batch:
        objects[key] = object_column(item.non_tensor_batch[key] for item in x)
    return DataProto(batch=batch, non_tensor_batch=objects)


__getattr__ = lazy_names(__name__, {}, old_names=True)


def _pick(mapping: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    return dict(mapping) if keys is None else {key: mapping[key] for key in keys}


def _renamed(mapping: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): column for key, column in mapping.items()}


def _rebuild(kind: type[DataProto], packed: Any, objects: Any, meta: Any) -> DataProto:
    return kind(unpack_tensor_dict(packed), objects, meta)


# Queues and pipes of torch.multiprocessing keep torch's own reductions: tensors in shared memory
# travel as a handle.
ForkingPickler.register(
    DataProto, lambda data: (type(data), (data.batch, data.non_tensor_batch, data.meta_info))
)
