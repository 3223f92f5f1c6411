"""Send from one process to several on any machines: NCCL between GPUs, gloo between CPUs."""

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.distributed.peers import PeerGroup
from verl.utils.errors import RolloutError
from verl.weight_sync.base import NamedTensors, TensorStream
from verl.weight_sync.buckets import (
    SLOTS,
    End,
    Piece,
    Unpacker,
    from_message,
    new_slots,
    pack,
    to_message,
)
from verl.weight_sync.fingerprint import FingerprintLog


@dataclass(frozen=True)
class BroadcastSender:
    """A `WeightSender` to all other members of `peers`, which have a `BroadcastReceiver` each.

    Args:
        peers: the group, in which this process is member 0.
        device: of the tensors.
        bucket_bytes: size of each of the two buckets.
        dtype: the receivers' dtype; wider tensors are cast before they travel.
    """

    peers: PeerGroup
    device: torch.device
    bucket_bytes: int
    dtype: torch.dtype | None = None

    def send(self, named_tensors: NamedTensors, log: FingerprintLog | None = None) -> None:
        """Send as `WeightSender.send` describes."""
        slots = new_slots(self.bucket_bytes, self.device)
        works: deque[Any] = deque()

        def free_slots() -> Iterator[Tensor]:
            for slot in itertools.cycle(slots):
                if len(works) == SLOTS:
                    works.popleft().wait()
                yield slot

        try:
            for bucket, pieces in pack(named_tensors, free_slots(), self.dtype):
                self.peers.say(to_message(pieces))
                works.append(self.peers.broadcast(bucket[: _used(pieces)]))
            for work in works:
                work.wait()
            end = End(None if log is None else log.read())
        except Exception as error:
            self._finish(End.after(error))
            raise

        faults = [fault for fault in self._finish(end) if fault]
        if faults:
            raise RolloutError(
                f"{len(faults)} rollout ranks did not take the weights. {' '.join(faults)}"
            )

    def _finish(self, end: End) -> list[str | None]:
        """Send the end; return the fault of every receiver, or None."""
        self.peers.say(to_message(end))
        return self.peers.answers()


class BroadcastReceiver:
    """A `WeightReceiver` for member 0 of `peers`."""

    def __init__(self, peers: PeerGroup, *, device: torch.device) -> None:
        self._peers = peers
        self._device = device
        self._fingerprints: Mapping[str, int] | None = None

    def tensors(self) -> TensorStream:
        """Yield the tensors of each bucket while the next bucket arrives."""
        unpacker = Unpacker()
        self._fingerprints = None
        coming = self._next_bucket()
        while not isinstance(coming, End):
            bucket, pieces, work = coming
            coming = self._next_bucket()
            work.wait()
            yield from unpacker.unpack(bucket, pieces)

        self._fingerprints = coming.proof()

    def expected(self) -> Mapping[str, int] | None:
        """Return the sender's fingerprints, as `WeightReceiver.expected` describes."""
        return self._fingerprints

    def report(self, fault: str | None) -> None:
        """Report to the sender. The other receivers do not raise for this one's fault."""
        self._peers.answer(fault)

    def _next_bucket(self) -> tuple[Tensor, list[Piece], Any] | End:
        message = from_message(self._peers.hear())
        if isinstance(message, End):
            return message
        bucket = torch.empty(_used(message), dtype=torch.uint8, device=self._device)
        return bucket, message, self._peers.broadcast(bucket)


def _used(pieces: list[Piece]) -> int:
    """Return how many bytes of a bucket these pieces take."""
    last = pieces[-1]
    return last.offset + last.count * last.dtype.itemsize
