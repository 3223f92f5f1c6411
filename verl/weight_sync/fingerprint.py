"""Fingerprints of tensors, which prove that a hand-over brought every bit to its place.

The fingerprint of a tensor with bits b_i (a signed integer for each element) is sum_i h(i) b_i mod
2^64, with an odd signed 32-bit hash h of the element's position in the whole tensor. As hashes are
odd, one changed bit always changes the sum. Elements that change places leave it equal with a
probability of about 2^-31. Parts of a tensor are summed where they lie, and the sums are added, so
only the sums leave the device.
"""

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# 2654435761, near 2^32 / golden ratio, as a signed number: neighbors get hashes far apart
_MULTIPLIER = -1640531535
_CHUNK = 1 << 14  # elements at once on a CPU: intermediate results stay in its caches
_KEPT_HASHES = 1 << 18  # 2 MiB
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Part(NamedTuple):
    """The place of a part in the whole tensor.

    Element k of the part is number start + k // run * stride + k % run of the whole. `run` 0: the
    part is one run of neighbors.
    """

    start: int = 0
    run: int = 0
    stride: int = 0


class Fingerprint(NamedTuple):
    """The fingerprint of a tensor, or of a rank's part; parts add up to the whole's value."""

    value: int
    is_part: bool = False


def fingerprints(tensors: Sequence[Tensor], parts: Sequence[Part] | None = None) -> Tensor:
    """Compute n fingerprints (n,) int64 on the device of the tensors, without waiting for it.

    Args:
        tensors: n tensors on one device.
        parts: their places in the whole tensors; None: all are whole.
    """
    parts = parts or [Part()] * len(tensors)
    assert len(parts) == len(tensors)
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)

    with torch.no_grad():
        bits = []
        for tensor in tensors:
            integers = tensor.detach().contiguous().view(_INTEGERS[tensor.itemsize])
            bits.append(integers.reshape(-1))
        if bits[0].is_cuda:
            # Triton exists only with CUDA.
            kernel = importlib.import_module("verl.weight_sync.fingerprint_kernel")
            return kernel.sum_of_bits(bits, parts)
        return torch.stack(list(map(_sum_of_bits, bits, parts)))


def parts_of(
    cut: Callable[[Tensor], Tensor], shape: Sequence[int]
) -> list[tuple[tuple[int, slice, slice], Part]]:
    """Describe the parts that `cut` takes of a tensor of `shape`.

    `cut` takes some rows or columns (the last two dimensions, which it counts from the end), the
    same everywhere. Or it returns zeros, which add nothing to the sum wherever they are placed.

    Returns:
        Indices into the result of `cut`, seen as (rest, rows, columns), each with its `Part`.
    """
    lead = math.prod(shape[:-2])
    rows = shape[-2] if len(shape) > 1 else 1
    columns = shape[-1]
    row_numbers = torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, columns)
    column_numbers = torch.arange(columns, dtype=torch.int32).expand(rows, columns)
    row_runs = _runs(cut(row_numbers)[:, 0])
    column_runs = _runs(cut(column_numbers)[0])

    found = []
    for number, (row, row_at, num_rows), (column, column_at, num_columns) in itertools.product(
        range(lead), row_runs, column_runs
    ):
        row_slice = slice(row_at, row_at + num_rows)
        column_slice = slice(column_at, column_at + num_columns)
        start = (number * rows + row) * columns + column
        found.append(((number, row_slice, column_slice), Part(start, num_columns, columns)))
    return found


class FingerprintLog:
    """The sender's fingerprints, of its tensors in the receiver's dtype.

    It is filled during a hand-over and read at its end.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._values: list[Tensor] = []

    def add(self, names: Iterable[str], values: Tensor) -> None:
        """Append the fingerprints `values` (n,) of n tensors."""
        self._names += names
        self._values.append(values)

    def read(self) -> dict[str, int]:
        """Return the fingerprints by name. Waits for the device."""
        values = torch.cat(self._values).tolist() if self._values else []
        assert len(values) == len(self._names)
        return dict(zip(self._names, values))


def _sum_of_bits(bits: Tensor, part: Part) -> Tensor:
    """Sum h(i) b_i of flat integers, chunk by chunk on a CPU."""
    if not part.run and part.start + bits.numel() <= _CHUNK:
        # Most tensors of a small model: one product.
        hashes = _hashes()[part.start : part.start + bits.numel()]
        return torch.dot(hashes, bits.to(torch.int64))

    total = torch.zeros((), dtype=torch.int64)
    for first in range(0, bits.numel(), _CHUNK):
        values = bits[first : first + _CHUNK].to(torch.int64)
        if part.run:
            places = torch.arange(first, first + len(values), dtype=torch.int64)
            places = places // part.run * part.stride + places % part.run
            mixed = (places + part.start).to(torch.int32).mul_(_MULTIPLIER)
        elif part.start + first + len(values) <= _KEPT_HASHES:
            total += torch.dot(_hashes()[part.start + first :][: len(values)], values)
            continue
        else:
            mixed = _multiples()[: len(values)] + signed((part.start + first) * _MULTIPLIER, 32)
        total += torch.dot(_mixed(mixed), values)
    return total


def _mixed(multiples: Tensor) -> Tensor:
    """Make odd hashes of multiples, in place."""
    # of a signed number `>>` copies its sign
    multiples ^= (multiples >> 15).bitwise_and_(0x1FFFF)
    return multiples.bitwise_or_(1).to(torch.int64)


@functools.cache
def _hashes() -> Tensor:
    """Return the hashes of the first positions, which small tensors have alone."""
    return _mixed(torch.arange(_KEPT_HASHES, dtype=torch.int32).mul_(_MULTIPLIER))


@functools.cache
def _multiples() -> Tensor:
    return torch.arange(_CHUNK, dtype=torch.int32).mul_(_MULTIPLIER)


def signed(number: int, bits: int) -> int:
    """Return the signed number with the last `bits` bits of `number`."""
    half = 1 << (bits - 1)
    return (number + half) % (2 * half) - half


def _runs(numbers: Tensor) -> list[tuple[int, int, int]]:
    """Return (first number, its index, length) of each run of consecutive numbers."""
    if not numbers.any():
        return [(0, 0, len(numbers))]

    breaks = (numbers[1:] != numbers[:-1] + 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], len(numbers)]
    return [(int(numbers[start]), start, end - start) for start, end in zip(starts, ends)]
