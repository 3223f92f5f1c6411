"""The columns of a batch: make, check, choose, rename and merge them."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl.utils.column_dicts import (
    leading_sizes,
    object_bytes,
    object_column,
    tensor_bytes,
    tensors_and_arrays,
    union_dict,
    union_numpy_dict,
    union_tensor_dict,
)
from verl.utils.errors import BatchError
from verl.utils.units import MIB

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

Keys: TypeAlias = Sequence[str] | None


class DataProtoConfig:
    """Settings of all batches in this process."""

    auto_padding: bool = False  # every batch may be cut into uneven chunks and padded on dispatch
    auto_padding_key = "_verl_auto_padding"  # in meta_info: the same for one batch


@dataclass(eq=False)
class BatchColumns:
    """The columns of a DataProto, which adds the operations on rows."""

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
    ) -> "Self":
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
    ) -> "Self":
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
    def from_tensordict(cls, tensor_dict: TensorDict) -> "Self":
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

    def to(self, device: Any) -> "Self":
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
    ) -> "Self":
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

    def pop(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
    ) -> "Self":
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

    def rename(self, old_keys: Any = None, new_keys: Any = None) -> "Self":
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

    def union(self, other: "Self") -> "Self":
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


def _pick(mapping: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    return dict(mapping) if keys is None else {key: mapping[key] for key in keys}


def _renamed(mapping: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): column for key, column in mapping.items()}
