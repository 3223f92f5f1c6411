"""Columns by name: dictionaries of tensors, of arrays, and what one needs to merge them."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from verl.utils.errors import BatchError


def leading_sizes(columns: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """The first `count` sizes, which all columns must share (0 of each without columns); else
    BatchError."""
    sizes = {key: tuple(column.shape[:count]) for key, column in columns.items()}
    if (
        count < 1
        or len(set(sizes.values())) > 1
        or any(len(size) < count for size in sizes.values())
    ):
        raise BatchError(
            f"All columns must have and share {count} (at least 1) leading sizes, got {sizes}."
        )
    return next(iter(sizes.values()), (0,) * count)


def object_column(values: Iterable[Any]) -> np.ndarray:
    """A 1-D object array, also of lists of equal length, of which numpy would make a matrix."""
    rows = list(values)
    array = np.empty(len(rows), dtype=object)
    for row, value in enumerate(rows):
        array[row] = value
    return array


def lists_as_matrix(column: Any) -> Any:
    """A 1-D object array of lists of one length as an object array with a second dimension; any
    other column as it is."""
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
    """All columns of both; BatchError where batch sizes differ or one key holds unequal values (NaN
    equals NaN)."""
    if tensor_dict1 is None or tensor_dict2 is None:
        return tensor_dict2 if tensor_dict1 is None else tensor_dict1
    size, other_size = tensor_dict1.batch_size, tensor_dict2.batch_size
    if size != other_size:
        raise BatchError(
            f"A union needs equal batch sizes, got {list(size)} and {list(other_size)}."
        )
    columns: Any = union_dict(
        dict(tensor_dict1.items()), dict(tensor_dict2.items()), "tensor columns"
    )
    return TensorDict(columns, batch_size=size, device=tensor_dict1.device)


def union_numpy_dict(tensor_dict1: dict[str, Any], tensor_dict2: dict[str, Any]) -> dict[str, Any]:
    """All columns of both; BatchError where one key holds unequal values (NaN equals NaN, also deep
    inside)."""
    return union_dict(tensor_dict1, tensor_dict2, "object columns")


def union_dict(one: dict[str, Any], other: dict[str, Any], kind: str) -> dict[str, Any]:
    """All entries of both; `kind` is what the BatchError calls them where one key holds unequal
    values."""
    if clash := [key for key in one if key in other and not same_value(one[key], other[key])]:
        raise BatchError(
            f"union refuses unequal values under one key: {kind} {clash}. Rename or drop one "
            "side's."
        )
    return {**one, **{key: other[key] for key in other if key not in one}}


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are equal where NaN equals NaN; tensors and arrays must also share shape
    and dtype."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and _all_equal(one, other.to(one.device))
        )
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
