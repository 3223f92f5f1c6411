"""Named tensors in flat memory of a fixed size, as they travel between processes; what is larger is
cut."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.weight_sync.base import NamedTensors

_ALIGNMENT = 256  # bytes: where a tensor starts in a bucket


class Piece(NamedTuple):
    """Elements of a tensor, and at which byte of the bucket they stand."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    first: int
    count: int
    offset: int


class End(NamedTuple):
    """What a sender tells after the last bucket."""

    fingerprints: dict[str, int] | None = None
    fault: str | None = None  # why not all was sent


def to_message(content: list[Piece] | End) -> Any:
    """Turn a bucket's table of contents, or the end, into a JSON value."""
    if isinstance(content, End):
        return {"fingerprints": content.fingerprints, "fault": content.fault}
    return [[*piece._replace(dtype=str(piece.dtype).split(".")[-1])] for piece in content]


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
    """Fill one of `buckets` (flat bytes) after the other; each is given when it is full, with what
    is in it.

    The next bucket is asked for when it is needed. What is wider than `dtype` is cast on the way,
    if it is floating point. A tensor that does not fit into the rest of a bucket begins the next
    one; one that is larger is cut.
    """
    bucket: Tensor | None = None
    pieces: list[Piece] = []
    end = 0
    for name, tensor in named_tensors:
        flat, travel = tensor.detach().reshape(-1), travel_dtype(tensor, dtype)
        if bucket is not None and end + flat.numel() * travel.itemsize > len(bucket):
            yield bucket, pieces
            bucket = None
        first = 0
        while True:
            if bucket is None:
                bucket, pieces, end = next(buckets), [], 0
                assert len(bucket) >= travel.itemsize
            count = min(flat.numel() - first, (len(bucket) - end) // travel.itemsize)
            _view(bucket, end, count, travel).copy_(flat[first : first + count])
            pieces.append(Piece(name, tuple(tensor.shape), travel, first, count, end))
            end = -(-(end + count * travel.itemsize) // _ALIGNMENT) * _ALIGNMENT
            first += count
            if first == flat.numel():
                break
            yield bucket, pieces
            bucket = None
    if bucket is not None:
        yield bucket, pieces


def travel_dtype(tensor: Tensor, receivers: torch.dtype | None) -> torch.dtype:
    """The narrower of the tensor's dtype and the receiver's, which is for what is floating
    point."""
    narrows = (
        receivers is not None
        and tensor.is_floating_point()
        and receivers.itemsize < tensor.itemsize
    )
    return receivers if receivers is not None and narrows else tensor.dtype


def new_slots(num_bytes: int, count: int, device: torch.device) -> Sequence[Tensor]:
    """`count` buckets that tensors of any dtype may begin in."""
    size = slot_bytes(num_bytes)
    return torch.empty(count * size, dtype=torch.uint8, device=device).split(size)


def slot_bytes(num_bytes: int) -> int:
    """`num_bytes`, and what it takes for the bucket behind it to be aligned."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class Unpacker:
    """Whole tensors from the buckets of one hand-over, in the order in which they were packed."""

    def __init__(self) -> None:
        self._cut: Tensor | None = None  # flat, while some of it is missing

    def unpack(self, bucket: Tensor, pieces: list[Piece]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every tensor that this bucket completes: within its memory, unless it
        was cut."""
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
                whole, self._cut = self._cut, None
                yield name, whole.view(shape)


def _view(bucket: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    return bucket[offset : offset + count * dtype.itemsize].view(dtype)
