"""The collectives of the package; each is an identity where a rank is alone."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Axis:
    """The ranks along one axis of the mesh."""

    size: int = 1
    rank: int = 0  # number of this process along the axis
    group: dist.ProcessGroup | None = None  # None: all ranks


ALONE = Axis()


def all_reduce_sum(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum `tensor` along the axis, in place. Every rank of the axis must call it."""
    if axis.size > 1:
        dist.all_reduce(tensor, group=axis.group)
    return tensor


def sum_of(number: int, axis: Axis) -> int:
    """Sum a host number along the axis, over gloo: no device is waited for."""
    return int(all_reduce_sum(torch.tensor(number), axis).item())


def max_of(number: int, axis: Axis) -> int:
    """Return the largest of a host number along the axis."""
    if axis.size == 1:
        return number
    largest = torch.tensor(number)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=axis.group)
    return int(largest.item())


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Gather a small picklable value of every rank, in the order of ranks."""
    if axis.size == 1:
        return [value]
    values: list[Any] = [None] * axis.size
    dist.all_gather_object(values, value, group=axis.group)
    return values


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here."""
    sum_of(0, axis)
