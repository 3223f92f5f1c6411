"""DataProto: a batch that crosses process borders. Tensors and object columns side by side, with a
little meta.

Letters as in `verl/columns.py`: B rows. Every method either returns a new DataProto that shares
memory with this one where a view allows it, or says that it works in place. A wrong argument
raises BatchError (a ValueError, and an AssertionError as in verl 0.5), which names the columns.
"""

import copy
import importlib
import itertools
import math
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from verl.utils.column_dicts import (
    leading_sizes,
    lists_as_matrix,
    object_column,
    union_dict,
    union_numpy_dict,
    union_tensor_dict,
)
from verl.utils.errors import BatchError
from verl.utils.pickling import pack_tensor_dict, unpack_tensor_dict

# int, or bool of length B
Indices: TypeAlias = Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor
Keys: TypeAlias = Sequence[str] | None


class DataProtoConfig:
    """Settings of all batches in this process."""

    auto_padding: bool = False  # every batch may be cut into uneven chunks and padded on dispatch
    auto_padding_key = "_verl_auto_padding"  # in meta_info: the same for one batch


@dataclass(eq=False)
class DataProtoItem:
    """One row: tensors without the batch dimension (None without tensor columns), and the objects
    themselves."""

    batch: TensorDict = None  # pyright: ignore[reportAssignmentType]
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DataProto:
    """B rows of tensor columns (`batch`, None where there are none) and of numpy columns
    (`non_tensor_batch`)."""

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
        return next((len(column) for column in self.non_tensor_batch.values()), 0)

    def __getitem__(self, item: Any) -> Any:
        """An int gives a DataProtoItem; a slice, a list, an array or a tensor of indices gives a
        DataProto."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | tuple) or getattr(item, "ndim", 0) == 1:
            return self.select_idxs(item)
        row = range(len(self))[item]  # IndexError ends `for item in data`
        tensors: Any = None if self.batch is None else self.batch[row]
        return DataProtoItem(
            tensors,
            {key: column[row] for key, column in self.non_tensor_batch.items()},
            self.meta_info,
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Plain pickle: only the bytes of these rows, as numpy arrays, which protocol 5 hands over
        without a copy."""
        return _rebuild, (
            type(self),
            pack_tensor_dict(self.batch),
            self.non_tensor_batch,
            self.meta_info,
        )

    def check_consistency(self) -> None:
        """Raise BatchError unless all columns have the same number of rows."""
        dims = 1 if self.batch is None else len(self.batch.batch_size)
        if dims < 1 or (dims > 1 and self.non_tensor_batch):
            raise BatchError(
                f"A batch has one row dimension, or several without object columns; got {dims} and "
                f"object columns {list(self.non_tensor_batch)}. unfold_batch_dim flattens a batch."
            )
        for key, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray) or column.ndim == 0 or len(column) != len(self):
                fact = (
                    f"{len(column)} rows" if getattr(column, "ndim", 0) else type(column).__name__
                )
                raise BatchError(
                    f"Object column '{key}' must be a numpy array of {len(self)} rows like the "
                    f"others, got {fact}. from_dict(non_tensors=...) makes an array of a list."
                )

    @classmethod
    def from_single_dict(
        cls, data: dict[str, Any], meta_info: dict | None = None, auto_padding: bool = False
    ):
        """Tensors go to `batch`, numpy arrays to `non_tensor_batch`; anything else is a
        BatchError."""
        strange = {
            k: type(v).__name__
            for k, v in data.items()
            if not isinstance(v, torch.Tensor | np.ndarray)
        }
        if strange:
            raise BatchError(f"Columns must be tensors or numpy arrays, got {strange}.")
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        objects = {key: value for key, value in data.items() if key not in tensors}
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
        """Columns by name. Lists become 1-D object arrays; the first `num_batch_dims` sizes of
        tensors must agree."""
        columns: Any = dict(tensors or {})
        batch: Any = (
            TensorDict(columns, leading_sizes(columns, num_batch_dims)) if columns else None
        )
        objects = {
            k: v if isinstance(v, np.ndarray) else object_column(v)
            for k, v in (non_tensors or {}).items()
        }
        meta = dict(meta_info or {}) | (
            {DataProtoConfig.auto_padding_key: True} if auto_padding else {}
        )
        return cls(batch=batch, non_tensor_batch=objects, meta_info=meta)

    def to(self, device: Any) -> "DataProto":
        """Move the tensors to `device`, in place; returns self."""
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
        """The named columns and meta entries, None meaning all. Tensors are shared unless
        `deepcopy`."""
        self._require(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        batch: Any = (
            None if self.batch is None else self.batch.select(*_pick(self._tensors(), batch_keys))
        )
        objects = _pick(self.non_tensor_batch, non_tensor_batch_keys)
        selected = type(self)(
            batch=batch, non_tensor_batch=objects, meta_info=_pick(self.meta_info, meta_info_keys)
        )
        return copy.deepcopy(selected) if deepcopy else selected

    def select_idxs(self, idxs: Indices) -> "DataProto":
        """The rows at integer `idxs`, in that order, repeats allowed; or the rows where a bool mask
        of B is true."""
        index = torch.as_tensor(idxs if isinstance(idxs, torch.Tensor) else np.asarray(idxs)).cpu()
        if index.ndim != 1 or (index.numel() and index.is_floating_point()):
            raise BatchError(
                f"Rows are chosen by a 1-D list of int or bool, got {index.dtype} of "
                f"{list(index.shape)}."
            )
        if index.dtype == torch.bool:
            if len(index) != len(self):
                raise BatchError(
                    f"A mask must have one entry for each of the {len(self)} rows, got "
                    f"{len(index)}."
                )
            index = index.nonzero().flatten()
        index = index.long()
        if index.numel() and not -len(self) <= int(index.min()) <= int(index.max()) < len(self):
            raise IndexError(
                f"Rows {int(index.min())} to {int(index.max())} are not all among {len(self)} rows."
            )
        array = index.numpy()
        return self._map(
            lambda column: column[index if isinstance(column, torch.Tensor) else array], len(index)
        )

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> "DataProto":
        """Rows `start:end:step`, as views of this batch where the step is positive."""
        rows, numbers = slice(start, end, step), range(len(self))[start:end:step]
        if step is not None and step < 0:  # torch has no negative strides
            return self.select_idxs(numbers)
        return self._map(lambda column: column[rows], len(numbers))

    def pop(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
    ) -> "DataProto":
        """Take the named columns and meta entries out of this batch (in place) and return them;
        None means none."""
        wanted = [
            list(dict.fromkeys(keys or ()))
            for keys in (batch_keys, non_tensor_batch_keys, meta_info_keys)
        ]
        self._require(*wanted)  # before anything is taken: all or nothing
        homes: Any = (self.batch, self.non_tensor_batch, self.meta_info)
        tensors, objects, meta = (
            {key: home.pop(key) for key in keys} for home, keys in zip(homes, wanted)
        )
        return type(self).from_dict(tensors, objects, meta)

    def rename(self, old_keys: Any = None, new_keys: Any = None) -> "DataProto":
        """Rename columns in place (a name or a list of names each); returns self."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys or ())
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys or ())
        known, names = self._columns(), dict(zip(old, new))
        if (
            not set(old) <= set(known)
            or len(old) != len(new)
            or len({names.get(k, k) for k in known}) < len(known)
        ):
            raise BatchError(
                f"Cannot rename {old} to {new}: columns are {list(known)}, and names must stay "
                "different."
            )
        if self.batch is not None:
            renamed: Any = {names.get(key, key): column for key, column in self._tensors().items()}
            self.batch = TensorDict(
                renamed, batch_size=self.batch.batch_size, device=self.batch.device
            )
        self.non_tensor_batch = {
            names.get(key, key): column for key, column in self.non_tensor_batch.items()
        }
        return self

    def union(self, other: "DataProto") -> "DataProto":
        """Add the columns and meta of `other`, in place; returns self. A key that both have must
        have equal values."""
        both = type(self)(  # checked as a whole before this batch changes
            batch=union_tensor_dict(self.batch, other.batch),
            non_tensor_batch=union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch),
            meta_info=union_dict(self.meta_info, other.meta_info, "meta_info"),
        )
        self.batch, self.non_tensor_batch, self.meta_info = (
            both.batch,
            both.non_tensor_batch,
            both.meta_info,
        )
        return self

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict | None = None,
    ) -> Iterator["DataProto"]:
        """Mini-batches of `mini_batch_size` rows, which must divide B, `epochs` times over.

        `dataloader_kwargs` go to torch's DataLoader: {"shuffle": True} draws a new order each
        epoch, the same ones for the same `seed`.
        """
        if mini_batch_size < 1 or len(self) % mini_batch_size:
            raise BatchError(
                f"mini_batch_size must divide the {len(self)} rows of the batch, got "
                f"{mini_batch_size}."
            )
        if not len(self):  # a shuffling DataLoader refuses an empty data set
            return iter(())
        # The loader draws row numbers alone, so that a mini-batch is one gather and not a stack of
        # rows.
        settings: dict[str, Any] = {"collate_fn": self.select_idxs, **(dataloader_kwargs or {})}
        # else the global generator, which in order is left alone
        if seed is not None or not settings.get("shuffle"):
            settings["generator"] = torch.Generator().manual_seed(seed or 0)
        loader: Any = DataLoader(range(len(self)), batch_size=mini_batch_size, **settings)  # pyright: ignore
        return (mini_batch for _ in range(epochs) for mini_batch in loader)

    def is_padding_enabled(self) -> bool:
        """Whether this batch, or every batch of the process, may be cut unevenly."""
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
        self.reorder([*range(len(self)), *[row] * padding_size])

    def chunk(self, chunks: int) -> list["DataProto"]:
        """`chunks` pieces in order. Equal ones, or with padding enabled of sizes that differ by at
        most one."""
        if chunks < 1 or (len(self) % chunks and not self.is_padding_enabled()):
            raise BatchError(
                f"chunk needs a number of rows divisible by chunks, got {len(self)} rows and "
                f"{chunks} chunks. Pad with pad_dataproto_to_divisor, or build the batch with "
                "auto_padding=True."
            )
        size, longer = divmod(len(self), chunks)
        starts = (i * size + min(i, longer) for i in range(chunks + 1))
        return [self.slice(start, end) for start, end in itertools.pairwise(starts)]

    def split(self, split_size: int) -> list["DataProto"]:
        """Pieces of `split_size` rows in order; the last one has what is left."""
        if split_size < 1:
            raise BatchError(f"split_size must be at least 1, got {split_size}.")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: list["DataProto"]) -> "DataProto":
        """All rows, one batch after the other. Columns must be the same in all; meta_info is the
        first one's."""
        if not data:
            raise BatchError("concat needs at least one DataProto, got an empty list.")
        first, tensors, columns = data[0], data[0]._tensors(), data[0]._columns()
        for position, other in enumerate(data):
            differing = (
                columns.items() ^ other._columns().items()
                or tensors.keys() ^ other._tensors().keys()
            )
            if differing:
                raise BatchError(
                    f"concat needs the same columns in all batches; {position} differs from 0 in "
                    f"{sorted(differing)}."
                )
        batch: Any = None
        if all(piece.batch is not None for piece in data):
            joined: Any = {key: torch.cat([piece.batch[key] for piece in data]) for key in tensors}
            sizes = [sum(len(piece) for piece in data), *first.batch.batch_size[1:]]
            batch = TensorDict(joined, batch_size=sizes, device=first.batch.device)
        objects = {
            key: np.concatenate([piece.non_tensor_batch[key] for piece in data])
            for key in first.non_tensor_batch
        }
        return type(first)(batch=batch, non_tensor_batch=objects, meta_info=dict(first.meta_info))

    def reorder(self, indices: Indices) -> None:
        """Put the rows into the order of `indices`, in place."""
        other = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = other.batch, other.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> "DataProto":
        """Each row `repeat_times` times: a,a,b,b when interleaved, else a,b,a,b."""
        if repeat_times < 0:
            raise BatchError(f"repeat_times must not be negative, got {repeat_times}.")
        rows = np.arange(len(self))
        return self.select_idxs(
            np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)
        )

    def sample_level_repeat(self, repeat_times: Indices) -> "DataProto":
        """Row i `repeat_times[i]` times, copies side by side."""
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
        """Cut dimension 1 of `split_keys` into `n_split` rows each: (B, n_split * k, ...) -> (B *
        n_split, k, ...). An object column of lists of one length L counts as (B, L).

        All other columns are repeated to match, rows of one origin side by side.
        """
        columns = {**self._tensors(), **self.non_tensor_batch}
        rows = len(self) * n_split
        cut: dict[str, Any] = {}
        for key in split_keys or ():
            column = lists_as_matrix(columns[key]) if key in columns else None
            if column is None or column.ndim < 2 or n_split < 1 or column.shape[1] % n_split:
                fact = (
                    f"there are {list(columns)}"
                    if column is None
                    else f"it has {tuple(column.shape[1:])} after the rows"
                )
                raise BatchError(
                    f"Column '{key}' needs a dimension 1 divisible by n_split={n_split}; {fact}."
                )
            cut[key] = column.reshape(rows, column.shape[1] // n_split, *column.shape[2:])

        unfolded = self.repeat(n_split)
        for key, column in cut.items():
            home: Any = (
                unfolded.non_tensor_batch if key in self.non_tensor_batch else unfolded.batch
            )
            home[key] = column
        return unfolded

    def save_to_disk(self, filepath: str | os.PathLike) -> None:
        """Write one file; a reader never sees half of it."""
        partial = Path(f"{os.fspath(filepath)}.partial")
        with partial.open("wb") as file:
            pickle.dump(self, file, protocol=5)
        partial.replace(filepath)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike) -> "DataProto":
        """Read a file of `save_to_disk`. It is a pickle: load only what you trust."""
        with Path(filepath).open("rb") as file:
            data = pickle.load(file)
        if not isinstance(data, DataProto):
            raise BatchError(f"Expected a DataProto in '{filepath}', found {type(data).__name__}.")
        return data

    def print_size(self, prefix: str = "") -> None:
        """Print rows and MiB; of objects only their own size, not what they point to."""
        tensor_mib = (
            sum(tensor.numel() * tensor.element_size() for tensor in self._tensors().values())
            / 2**20
        )
        object_mib = (
            sum(sys.getsizeof(x) for column in self.non_tensor_batch.values() for x in column.flat)
            / 2**20
        )
        print(
            (
                f"{prefix}{len(self)} rows, {tensor_mib:.3f} MiB of tensors, {object_mib:.3f} MiB "
                "of objects"
            ),
            flush=True,
        )

    def _tensors(self) -> dict[str, Any]:
        return {} if self.batch is None else dict(self.batch.items())  # pyright: ignore[reportReturnType]

    def _columns(self) -> dict[str, tuple[int, ...]]:
        """Every column's sizes beside the rows."""
        return {
            key: tuple(column.shape[1:])
            for key, column in {**self._tensors(), **self.non_tensor_batch}.items()
        }

    def _require(self, *wanted: Sequence[str]) -> None:
        homes = (self._tensors(), self.non_tensor_batch, self.meta_info)
        for kind, keys, home in zip(("tensor column", "object column", "meta_info"), wanted, homes):
            if missing := [key for key in keys if key not in home]:
                raise BatchError(
                    f"No {kind} {missing} in this DataProto; there are {sorted(home)}."
                )

    def _map(self, function: Callable[[Any], Any], rows: int, inner: Any = None) -> "DataProto":
        """Every column through a function; `rows` and `inner` (None: as here) are the batch sizes
        after it."""
        batch: Any = self.batch
        if batch is not None:
            sizes = [rows, *(batch.batch_size[1:] if inner is None else inner)]
            columns = {key: function(column) for key, column in batch.items()}
            batch = TensorDict(columns, batch_size=sizes, device=batch.device)
        objects = {key: function(column) for key, column in self.non_tensor_batch.items()}
        return type(self)(batch=batch, non_tensor_batch=objects, meta_info=dict(self.meta_info))


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Append rows, again from the first on, until `size_divisor` divides B; returns (padded, number
    appended)."""
    if size_divisor < 1:
        raise BatchError(f"size_divisor must be at least 1, got {size_divisor}.")
    pad_size = -len(data) % size_divisor
    return (
        data.select_idxs(np.arange(len(data) + pad_size) % len(data)) if pad_size else data
    ), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise BatchError(
            f"pad_size must lie between 0 and the {len(data)} rows of the batch, got {pad_size}."
        )
    return data.slice(0, len(data) - pad_size) if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Every column from (B, ...) to (new_batch_size, B / new_batch_size, ...)."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise BatchError(
            f"new_batch_size must divide the {len(data)} rows of the batch, got {new_batch_size}."
        )
    sizes = (new_batch_size, len(data) // new_batch_size)
    return data._map(
        lambda column: column.reshape(*sizes, *column.shape[1:]), new_batch_size, inner=()
    )


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Every column from (b_1, ..., b_k, ...) to (b_1 * ... * b_k, ...), k = `batch_dims`; undoes
    `fold_batch_dim`."""
    rows = math.prod(leading_sizes({**data._tensors(), **data.non_tensor_batch}, batch_dims))
    return data._map(
        lambda column: column.reshape(rows, *column.shape[batch_dims:]), rows, inner=()
    )


def collate_fn(x: list[DataProtoItem]) -> DataProto:
    """Rows back to a batch (for a DataLoader over a DataProto); without meta_info."""
    if not x:
        raise BatchError("collate_fn needs at least one row, got an empty list.")
    batch: Any = None if x[0].batch is None else torch.stack([item.batch for item in x])  # pyright: ignore
    objects = {
        key: object_column(item.non_tensor_batch[key] for item in x)
        for key in x[0].non_tensor_batch
    }
    return DataProto(batch=batch, non_tensor_batch=objects)


def __getattr__(name: str) -> Any:
    compat = importlib.import_module("verl.compat")
    if name in compat.OLD_PATHS[__name__]:
        return compat.find_old_name(__name__, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def _pick(mapping: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    return dict(mapping) if keys is None else {key: mapping[key] for key in keys}


def _rebuild(kind: type[DataProto], packed: Any, objects: Any, meta: Any) -> DataProto:
    return kind(unpack_tensor_dict(packed), objects, meta)


# Queues and pipes of torch.multiprocessing keep torch's own reductions: tensors in shared memory
# travel as a handle.
ForkingPickler.register(
    DataProto, lambda data: (type(data), (data.batch, data.non_tensor_batch, data.meta_info))
)
