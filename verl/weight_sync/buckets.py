"""Pack named tensors into flat memory of a fixed size, in which they travel between processes.

A tensor that is larger than a bucket is cut.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.utils.arithmetic import round_up
from verl.utils.errors import RolloutError, describe_error
from verl.weight_sync.base import NamedTensors, TensorStream

SLOTS = 2  # buckets, of which one is filled while the other is read
_ALIGNMENT = 256  # bytes: where a tensor starts in a bucket


class Piece(NamedTuple):
    """Consecutive elements of a tensor in a bucket."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    first: int  # number of the first element
    count: int
    offset: int  # byte of the bucket at which they begin


class End(NamedTuple):
    """The message after the last bucket."""

    fingerprints: dict[str, int] | None = None
    fault: str | None = None  # why the sender could not send everything

    @classmethod
    def after(cls, error: Exception) -> "End":
        """Return the end of a hand-over that an error of the sender has stopped.

        Without an end, the receivers would wait forever.
        """
        return cls(fault=describe_error(error))

    def proof(self) -> dict[str, int] | None:
        """Return the sender's fingerprints. Raises RolloutError if it did not send everything."""
        if self.fault is not None:
            raise RolloutError(f"The trainer did not send all weights. {self.fault}")
        return self.fingerprints


def to_message(content: list[Piece] | End) -> Any:
    """Turn a bucket's table of contents, or the end, into a JSON value."""
    if isinstance(content, End):
        return content._asdict()
    rows = []
    for piece in content:
        dtype = str(piece.dtype).removeprefix("torch.")
        rows.append([piece.name, piece.shape, dtype, piece.first, piece.count, piece.offset])
    return rows


def from_message(message: Any) -> list[Piece] | End:
    """Undo `to_message`."""
    if isinstance(message, dict):
        return End(**message)
    pieces = []
    for name, shape, dtype, first, count, offset in message:
        pieces.append(Piece(name, tuple(shape), getattr(torch, dtype), first, count, offset))
    return pieces


def pack(
    named_tensors: NamedTensors, buckets: Iterator[Tensor], dtype: torch.dtype | None = None
) -> Iterator[tuple[Tensor, list[Piece]]]:
    """Fill one of `buckets` (flat bytes) after the other, and yield each with its contents.

    The next bucket is asked for when it is needed. Floating-point tensors wider than `dtype` are
    cast. A tensor that does not fit into the rest of a bucket begins the next one; one that is
    larger than a bucket is cut.
    """
    bucket: Tensor | None = None
    pieces: list[Piece] = []
    end = 0

    for name, tensor in named_tensors:
        flat = tensor.detach().reshape(-1)
        travel = travel_dtype(tensor, dtype)
        if bucket is not None and end + flat.numel() * travel.itemsize > len(bucket):
            yield bucket, pieces
            bucket = None

        first = 0
        while True:
            if bucket is None:
                bucket = next(buckets)
                assert len(bucket) >= travel.itemsize
                pieces = []
                end = 0
            count = min(flat.numel() - first, (len(bucket) - end) // travel.itemsize)
            _view(bucket, end, count, travel).copy_(flat[first : first + count])
            pieces.append(Piece(name, tuple(tensor.shape), travel, first, count, end))
            end = round_up(end + count * travel.itemsize, _ALIGNMENT)
            first += count
            if first == flat.numel():
                break
            yield bucket, pieces
            bucket = None

    if bucket is not None:
        yield bucket, pieces


def travel_dtype(tensor: Tensor, receivers: torch.dtype | None) -> torch.dtype:
    """Return the narrower of the tensor's dtype and, for floating point, the receivers'."""
    if receivers is None or not tensor.is_floating_point():
        return tensor.dtype
    return receivers if receivers.itemsize < tensor.itemsize else tensor.dtype


def host_copies(named_tensors: NamedTensors, dtype: torch.dtype | None) -> NamedTensors:
    """Yield copies on the host, in the `travel_dtype`: the next tensor may reuse memory of this."""
    for name, tensor in named_tensors:
        cast = tensor.detach().to(travel_dtype(tensor, dtype))
        yield name, cast.to("cpu", copy=True)


def new_slots(num_bytes: int, device: torch.device) -> Sequence[Tensor]:
    """Allocate the buckets, each aligned for tensors of any dtype."""
    size = slot_bytes(num_bytes)
    return torch.empty(SLOTS * size, dtype=torch.uint8, device=device).split(size)


def slot_bytes(num_bytes: int) -> int:
    """Round `num_bytes` up, so that the bucket behind it is aligned."""
    return round_up(num_bytes, _ALIGNMENT)


class Unpacker:
    """Restores whole tensors from the buckets of one hand-over, in the order of packing."""

    def __init__(self) -> None:
        self._cut: Tensor | None = None  # flat, while some of it is missing

    def unpack(self, bucket: Tensor, pieces: list[Piece]) -> TensorStream:
        """Yield (name, tensor) of every tensor that this bucket completes.

        A tensor lies within the bucket's memory, unless it was cut.
        """
        for name, shape, dtype, first, count, offset in pieces:
            part = _view(bucket, offset, count, dtype)
            size = torch.Size(shape).numel()
            if count == size:
                yield name, part.view(shape)
                continue

            if self._cut is None:
                self._cut = torch.empty(size, dtype=dtype, device=bucket.device)
            self._cut[first : first + count].copy_(part)
            if first + count == size:
                whole = self._cut
                self._cut = None
                yield name, whole.view(shape)


def _view(bucket: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    return bucket[offset : offset + count * dtype.itemsize].view(dtype)
