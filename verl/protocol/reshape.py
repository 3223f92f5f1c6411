"""Pad, fold and unfold a batch, and join single rows to one."""

import math
from typing import Any

import numpy as np
import torch

from verl.protocol.data_proto import DataProto, DataProtoItem
from verl.utils.column_dicts import leading_sizes, object_column
from verl.utils.errors import BatchError


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
