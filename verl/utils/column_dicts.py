"""Merge and compare dictionaries of columns, which are tensors or arrays."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.utils.errors import BatchError


def leading_sizes(columns: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Return the first `count` sizes, zeros if there are no columns.

    Raises BatchError unless all columns have and share them.
    """
    sizes = {key: tuple(column.shape[:count]) for key, column in columns.items()}
    differ = len(set(sizes.values())) > 1
    too_few = any(len(size) < count for size in sizes.values())
    if count < 1 or differ or too_few:
        raise BatchError(
            f"All columns must have and share {count} (at least 1) leading sizes, got {sizes}."
        )
    return next(iter(sizes.values()), (0,) * count)


def object_column(values: Iterable[Any]) -> np.ndarray:
    """Make a 1-D object array, also of lists of equal length, which numpy would make a matrix."""
    rows = list(values)
    array = np.empty(len(rows), dtype=object)
    for row, value in enumerate(rows):
        array[row] = value
    return array


def lists_as_matrix(column: Any) -> Any:
    """Turn a 1-D object array of lists of one length into a 2-D object array.

    Any other column is returned as it is.
    """
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype != object:
        return column
    lengths = {len(row) if isinstance(row, list | tuple) else -1 for row in column}
    if len(lengths) != 1 or lengths == {-1}:
        return column
    matrix = np.empty((len(column), lengths.pop()), dtype=object)
    for number, row in enumerate(column):
        matrix[number] = object_column(row)
    return matrix


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Return all columns of both.

    Raises BatchError if batch sizes differ, or a key of both has unequal values; NaN equals NaN.
    """
    if tensor_dict1 is None:
        return tensor_dict2
    if tensor_dict2 is None:
        return tensor_dict1

    size = tensor_dict1.batch_size
    other_size = tensor_dict2.batch_size
    if size != other_size:
        raise BatchError(
            f"A union needs equal batch sizes, got {list(size)} and {list(other_size)}."
        )
    own: Any = dict(tensor_dict1.items())
    others: Any = dict(tensor_dict2.items())
    columns: Any = union_dict(own, others, "tensor columns")
    return TensorDict(columns, batch_size=size, device=tensor_dict1.device)


def union_numpy_dict(tensor_dict1: dict[str, Any], tensor_dict2: dict[str, Any]) -> dict[str, Any]:
    """Return all columns of both.

    Raises BatchError if a key of both has unequal values; NaN equals NaN at any depth.
    """
    return union_dict(tensor_dict1, tensor_dict2, "object columns")


def union_dict(one: dict[str, Any], other: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return all entries of both.

    Raises BatchError, which calls the entries `kind`, if a key of both has unequal values.
    """
    clash = [key for key in one if key in other and not same_value(one[key], other[key])]
    if clash:
        raise BatchError(
            f"union refuses unequal values under one key: {kind} {clash}. Rename or drop one "
            "side's."
        )
    added = {key: value for key, value in other.items() if key not in one}
    return {**one, **added}


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values are equal; NaN equals NaN.

    Tensors and arrays must also share shape and dtype.
    """
    if one is other:
        return True

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return _all_equal(one, other.to(one.device))

    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.shape != other.shape or (one.dtype == object) != (other.dtype == object):
            return False
        if one.dtype == object:
            return all(same_value(x, y) for x, y in zip(one.flat, other.flat))
        return one.dtype.kind == other.dtype.kind and _all_equal(one, other)

    if isinstance(one, torch.Tensor | np.ndarray) or isinstance(other, torch.Tensor | np.ndarray):
        return False
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same_value(x, y) for x, y in zip(one, other))
    return bool(one == other or (one != one and other != other))


def _all_equal(one: Any, other: Any) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())
