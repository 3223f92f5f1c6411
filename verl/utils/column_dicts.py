"""Make, join, merge and compare dictionaries of columns, which are tensors or arrays."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from verl.utils.errors import BatchError

# int, or bool with an entry for each row
Indices: TypeAlias = Sequence[int] | Sequence[bool] | np.ndarray | Tensor


def tensors_and_arrays(
    columns: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    """Sort columns into tensors and numpy arrays.

    Raises BatchError for a column that is neither.
    """
    tensors: dict[str, Tensor] = {}
    arrays: dict[str, np.ndarray] = {}
    strange: dict[str, str] = {}
    for key, column in columns.items():
        if isinstance(column, Tensor):
            tensors[key] = column
        elif isinstance(column, np.ndarray):
            arrays[key] = column
        else:
            strange[key] = type(column).__name__

    if strange:
        raise BatchError(f"Columns must be tensors or numpy arrays, got {strange}.")
    return tensors, arrays


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of all elements; a view counts as much as a copy of it."""
    return sum(tensor.nbytes for tensor in tensors.values())


def object_bytes(columns: Mapping[str, np.ndarray]) -> int:
    """Return the bytes of all values, without the objects that they refer to."""
    total = 0
    for column in columns.values():
        total += sum(map(sys.getsizeof, column.flat))
    return total


def leading_sizes(columns: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Return the first `count` sizes, zeros if there are no columns.

    Raises BatchError unless all columns are tensors or arrays that have and share them.
    """
    sizes: dict[str, tuple[int, ...]] = {}
    for key, column in columns.items():
        if not hasattr(column, "shape"):
            raise BatchError(
                f"Column '{key}' must be a tensor, got {type(column).__name__}. Make it one by "
                "torch.tensor(...), or give it as one of from_dict(non_tensors=...)."
            )
        sizes[key] = tuple(column.shape[:count])

    different = set(sizes.values()) or {(0,) * count}
    shared = different.pop()
    if count < 1 or different or len(shared) < count:
        raise BatchError(
            f"All columns must have and share {count} (at least 1) leading sizes, got {sizes}."
        )
    return shared


def row_numbers(idxs: Indices, num_rows: int) -> Tensor:
    """Return integer `idxs` as (n,) int64, or the numbers of the rows where a mask is true.

    Raises BatchError for another kind of index, and IndexError for a row that does not exist.
    """
    # a copy, because torch takes no reversed array
    values = idxs if isinstance(idxs, Tensor) else np.array(idxs)
    index = torch.as_tensor(values).cpu()
    if index.ndim != 1 or (index.numel() and index.is_floating_point()):
        raise BatchError(
            f"Rows are chosen by a 1-D list of int or bool, got {index.dtype} of "
            f"{list(index.shape)}."
        )

    if index.dtype == torch.bool:
        if len(index) != num_rows:
            raise BatchError(
                f"A mask must have one entry for each of the {num_rows} rows, got {len(index)}."
            )
        index = index.nonzero().flatten()

    index = index.long()
    if index.numel():
        lowest = int(index.min())
        highest = int(index.max())
        if lowest < -num_rows or highest >= num_rows:
            raise IndexError(f"Rows {lowest} to {highest} are not all among {num_rows} rows.")
    return index


def cut_columns(columns: Mapping[str, Any], keys: Iterable[str], n_split: int) -> dict[str, Any]:
    """Cut dimension 1 of the columns `keys` into `n_split` rows each.

    Raises BatchError for a column that is missing or cannot be cut.
    """
    cut: dict[str, Any] = {}
    for key in keys:
        column = lists_as_matrix(columns[key]) if key in columns else None
        if column is None or column.ndim < 2 or n_split < 1 or column.shape[1] % n_split:
            if column is None:
                fact = f"there are {list(columns)}"
            else:
                fact = f"it has {tuple(column.shape[1:])} after the rows"
            raise BatchError(
                f"Column '{key}' needs a dimension 1 divisible by n_split={n_split}; {fact}."
            )
        size = column.shape[1] // n_split
        cut[key] = column.reshape(len(column) * n_split, size, *column.shape[2:])
    return cut


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

    lengths: set[int] = set()
    for row in column:
        if not isinstance(row, list | tuple):
            return column
        lengths.add(len(row))
    if len(lengths) != 1:
        return column

    matrix = np.empty((len(column), lengths.pop()), dtype=object)
    for number, row in enumerate(column):
        matrix[number] = object_column(row)
    return matrix


def join_tensor_dicts(pieces: Sequence[TensorDict]) -> TensorDict:
    """Append the rows of batches with the same columns, one after the other."""
    first = pieces[0]
    joined: Any = {}
    for key in first.keys():
        joined[key] = torch.cat([piece[key] for piece in pieces])
    rows = sum(len(piece) for piece in pieces)
    sizes = [rows, *first.batch_size[1:]]
    return TensorDict(joined, batch_size=sizes, device=first.device)


def join_numpy_dicts(pieces: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Append the rows of object columns with the same names, one after the other."""
    joined: dict[str, np.ndarray] = {}
    for key in pieces[0]:
        joined[key] = np.concatenate([piece[key] for piece in pieces])
    return joined


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

    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return _all_equal(one, other.to(one.device))

    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.shape != other.shape or (one.dtype == object) != (other.dtype == object):
            return False
        if one.dtype == object:
            return all(map(same_value, one.flat, other.flat))
        return one.dtype.kind == other.dtype.kind and _all_equal(one, other)

    if isinstance(one, Tensor | np.ndarray) or isinstance(other, Tensor | np.ndarray):
        return False
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return False
        return all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    return bool(one == other or (one != one and other != other))


def _all_equal(one: Any, other: Any) -> bool:
    are_equal = one == other
    are_nan = (one != one) & (other != other)
    return bool((are_equal | are_nan).all())
