"""From one rank of a process group to the others: NCCL to other GPUs, gloo between CPUs."""

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.distributed.collectives import Axis, gather_objects
from verl.utils.errors import RolloutError
from verl.weight_sync.base import NamedTensors
from verl.weight_sync.buckets import End, Piece, Unpacker, new_slots, pack
from verl.weight_sync.fingerprint import FingerprintLog

_SLOTS = 2


class BroadcastSender:
    """A `WeightSender` to all other ranks of `axis`, each of which makes a `BroadcastReceiver` for
    every hand-over.

    Args:
        dtype: the receivers', for what is wider.
    """

    def __init__(
        self,
        axis: Axis,
        *,
        device: torch.device,
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._axis, self._device = axis, device
        self._bucket_bytes, self._dtype = bucket_bytes, dtype

    def send(self, named_tensors: NamedTensors, log: FingerprintLog | None = None) -> None:
        """See `WeightSender.send`."""
        slots = new_slots(self._bucket_bytes, _SLOTS, self._device)
        works: deque[Any] = deque()

        def free_slots() -> Iterator[Tensor]:
            for slot in itertools.cycle(slots):
                if len(works) == _SLOTS:
                    works.popleft().wait()
                yield slot

        try:
            for bucket, pieces in pack(named_tensors, free_slots(), self._dtype):
                self._tell(pieces)
                works.append(
                    dist.broadcast(
                        bucket[: _used(pieces)],
                        group=self._axis.group,
                        group_src=self._axis.rank,
                        async_op=True,
                    )
                )
            for work in works:
                work.wait()
            end = End(None if log is None else log.read())
        except Exception as error:
            # The receivers would wait for ever for what does not come.
            self._finish(End(fault=f"{type(error).__name__}: {error}"))
            raise
        faults = [f"Rank {rank}: {fault}" for rank, fault in enumerate(self._finish(end)) if fault]
        if faults:
            raise RolloutError(f"{len(faults)} ranks did not take the weights. {' '.join(faults)}")

    def _finish(self, end: End) -> list[str | None]:
        self._tell(end)
        return gather_objects(None, self._axis)

    def _tell(self, value: Any) -> None:
        _broadcast_object(value, self._axis.rank, self._axis)


class BroadcastReceiver:
    """A `WeightReceiver` of what rank `root` of `axis` sends."""

    def __init__(self, axis: Axis, *, root: int, device: torch.device) -> None:
        self._axis, self._root, self._device = axis, root, device
        self._fingerprints: Mapping[str, int] | None = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightReceiver.tensors`. The next bucket comes while one is read."""
        unpacker = Unpacker()
        self._fingerprints = None
        coming = self._next_bucket()
        while not isinstance(coming, End):
            bucket, pieces, work = coming
            coming = self._next_bucket()
            work.wait()
            yield from unpacker.unpack(bucket, pieces)
        if coming.fault is not None:
            raise RolloutError(f"Rank {self._root} did not send all weights. {coming.fault}")
        self._fingerprints = coming.fingerprints

    def expected(self) -> Mapping[str, int] | None:
        """See `WeightReceiver.expected`."""
        return self._fingerprints

    def report(self, fault: str | None) -> None:
        """See `WeightReceiver.report`. The other receivers do not raise for this one's fault."""
        gather_objects(fault, self._axis)

    def _next_bucket(self) -> tuple[Tensor, list[Piece], Any] | End:
        pieces: list[Piece] | End = _broadcast_object(None, self._root, self._axis)
        if isinstance(pieces, End):
            return pieces
        bucket = torch.empty(_used(pieces), dtype=torch.uint8, device=self._device)
        work = dist.broadcast(bucket, group=self._axis.group, group_src=self._root, async_op=True)
        return bucket, pieces, work


def _used(pieces: list[Piece]) -> int:
    """Bytes of a bucket with these pieces."""
    return pieces[-1].offset + pieces[-1].count * pieces[-1].dtype.itemsize


def _broadcast_object(value: Any, root: int, axis: Axis) -> Any:
    values = [value]
    dist.broadcast_object_list(values, group=axis.group, group_src=root)
    return values[0]
