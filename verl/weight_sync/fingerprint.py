"""Numbers that differ where tensors do: what proves that a hand-over brought every bit to its
place.

The fingerprint of a tensor with bits b_i (a signed integer for each element) is sum_i h(i) b_i mod
2^64, with an odd signed 32-bit hash h of the element's position in the whole tensor. As hashes are
odd, one changed bit always changes the sum; elements that change places change it, but for a chance
of about 2^-31. It is a sum: parts of a tensor are added up where they lie, and the sums added.
Nothing but the sums leaves the device.
"""

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# 2654435761, near 2^32 / golden ratio, as a signed number: neighbours get hashes far apart
_MULTIPLIER = -1640531535
_CHUNK = 1 << 14  # elements at once on a CPU: what is made of them stays in its caches
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Part(NamedTuple):
    """Where a tensor lies in the whole one: its element k is number start + k // run * stride + k %
    run there.

    `run` 0: the elements are neighbours there, too.
    """

    start: int = 0
    run: int = 0
    stride: int = 0


class Fingerprint(NamedTuple):
    """Of a tensor, or of a rank's part of it: then those of all ranks add up to the whole's."""

    value: int
    is_part: bool = False


def fingerprints(tensors: Sequence[Tensor], parts: Sequence[Part] | None = None) -> Tensor:
    """(n,) int64 on the device of the tensors, which is not waited for. `parts`: by default all are
    whole."""
    parts = parts or [Part()] * len(tensors)
    assert len(parts) == len(tensors)
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    with torch.no_grad():
        bits = [
            tensor.detach().contiguous().view(_INTEGERS[tensor.itemsize]).reshape(-1)
            for tensor in tensors
        ]
        if bits[0].is_cuda:
            # Triton exists beside CUDA only.
            kernel = importlib.import_module("verl.weight_sync.fingerprint_kernel")
            return kernel.sum_of_bits(bits, parts)
        return torch.stack([_sum_of_bits(values, part) for values, part in zip(bits, parts)])


def parts_of(
    cut: Callable[[Tensor], Tensor], shape: Sequence[int]
) -> list[tuple[tuple[int, slice, slice], Part]]:
    """What `cut` takes of a tensor of `shape`: places in what it gives, seen as (rest, rows,
    columns), and their parts.

    `cut` takes some rows or columns (the last two dimensions, which it counts from the end), the
    same everywhere; or it gives zeros, whose sum is zero wherever they are said to lie.
    """
    lead, rows, columns = math.prod(shape[:-2]), shape[-2] if len(shape) > 1 else 1, shape[-1]
    taken_rows = cut(torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, columns))[:, 0]
    taken_columns = cut(torch.arange(columns, dtype=torch.int32).expand(rows, columns))[0]
    return [
        (
            (number, slice(row_at, row_at + num_rows), slice(column_at, column_at + num_columns)),
            Part((number * rows + row) * columns + column, num_columns, columns),
        )
        for number in range(lead)
        for row, row_at, num_rows in _runs(taken_rows)
        for column, column_at, num_columns in _runs(taken_columns)
    ]


class FingerprintLog:
    """What the sender knows of the tensors it sends, in the dtype that the receiver keeps them in.

    Filled while they are handed over, read once they all are.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._values: list[Tensor] = []

    def add(self, names: Iterable[str], values: Tensor) -> None:
        self._names += names
        self._values.append(values)

    def read(self) -> dict[str, int]:
        """By name; waits for the device."""
        values = torch.cat(self._values).tolist() if self._values else []
        assert len(values) == len(self._names)
        return dict(zip(self._names, values))


def _sum_of_bits(bits: Tensor, part: Part) -> Tensor:
    total = torch.zeros((), dtype=torch.int64)
    for first in range(0, bits.numel(), _CHUNK):
        values = bits[first : first + _CHUNK].to(torch.int64)
        if part.run:
            places = torch.arange(first, first + len(values), dtype=torch.int64)
            places = places // part.run * part.stride + places % part.run
            mixed = (places + part.start).to(torch.int32).mul_(_MULTIPLIER)
        else:
            mixed = _multiples()[: len(values)] + _signed((part.start + first) * _MULTIPLIER)
        mixed ^= (mixed >> 15).bitwise_and_(0x1FFFF)  # of a signed number `>>` copies its sign
        total += torch.dot(mixed.bitwise_or_(1).to(torch.int64), values)
    return total


@functools.cache
def _multiples() -> Tensor:
    return torch.arange(_CHUNK, dtype=torch.int32).mul_(_MULTIPLIER)


def _signed(number: int) -> int:
    """The signed 32-bit number with the last 32 bits of `number`."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _runs(numbers: Tensor) -> list[tuple[int, int, int]]:
    """(first number, where it stands, how many count on from it) of each run of neighbours."""
    if not numbers.any():
        return [(0, 0, len(numbers))]
    starts = [0, *((numbers[1:] != numbers[:-1] + 1).nonzero().flatten() + 1).tolist()]
    return [
        (int(numbers[start]), start, end - start)
        for start, end in zip(starts, [*starts[1:], len(numbers)])
    ]
