"""Hand over to a process of the same machine through memory of its GPU (CUDA IPC) or its host.

One of two buckets is filled while the other is read. Their contents, and the acknowledgements, are
messages on a connection, such as `multiprocessing.Pipe()`, or a `Listener` and a `Client` with a
local socket.
"""

import inspect
import itertools
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from verl.utils.errors import RolloutError, describe_error
from verl.weight_sync.base import NamedTensors, TensorStream
from verl.weight_sync.buckets import SLOTS, End, Piece, Unpacker, pack, slot_bytes
from verl.weight_sync.choice import device_of, gpu_uuid
from verl.weight_sync.fingerprint import FingerprintLog

_GONE = "The rollout process ended while weights were handed over to it."


@dataclass(frozen=True)
class _Memory:
    """Both buckets, one after the other. `gpu` None: a file, with its descriptor sent next."""

    bucket_bytes: int
    gpu: str | None = None  # UUID
    handle: tuple[Any, ...] = ()
    device_at: int = 0  # the place of the GPU's number in the handle


@dataclass(frozen=True)
class _Filled:
    """The message that a bucket can be read."""

    slot: int
    pieces: list[Piece]


class SharedMemorySender:
    """A `WeightSender` to the processes at the other ends of `connections`.

    Each of them makes a `SharedMemoryReceiver`.

    Args:
        connections: one to each receiver; or a function that waits for them. It is called by the
            first `send` when all buckets are full.
        device: of the memory. A GPU must be the receivers' own; its number there may differ. CPU
            means host memory, which a sender or receiver on a GPU pins.
        bucket_bytes: size of each bucket.
        dtype: the receivers' dtype; wider tensors are cast.
        pin: whether the sender's tensors come from a GPU.
    """

    def __init__(
        self,
        connections: Sequence[Connection] | Callable[[], Sequence[Connection]],
        *,
        device: torch.device,
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
        pin: bool = False,
    ) -> None:
        self._dtype = dtype
        self._wait = _wait_of(device, current=pin)
        bucket_bytes = slot_bytes(bucket_bytes)

        self._file: int | None = None  # descriptor, until the receivers have it
        if device.type == "cuda":
            memory = torch.empty(SLOTS * bucket_bytes, dtype=torch.uint8, device=device)
            rebuild, handle = reduce_tensor(memory)
            device_at = list(inspect.signature(rebuild).parameters).index("storage_device")
            self._shared = _Memory(bucket_bytes, gpu_uuid(device), handle, device_at)
        else:
            self._file = _new_file(SLOTS * bucket_bytes)
            memory = _map(self._file, SLOTS * bucket_bytes, pin=pin)
            self._shared = _Memory(bucket_bytes)
        self._memory = memory  # kept as long as a receiver may read it
        self._slots = memory.split(bucket_bytes)

        self._connections: Sequence[Connection] | None = None
        self._connect: Callable[[], Sequence[Connection]]
        if callable(connections):
            self._connect = connections
        else:
            self._connections = self._share(connections)

    def _share(self, connections: Sequence[Connection]) -> Sequence[Connection]:
        """Give the receivers the memory, and return their connections."""
        for connection in connections:
            connection.send(self._shared)
            if self._file is not None:
                peer = connection.recv()
                send_handle(connection, self._file, peer)
        if self._file is not None:
            os.close(self._file)
            self._file = None
        _raise_faults([connection.recv() for connection in connections])
        return connections

    def send(self, named_tensors: NamedTensors, log: FingerprintLog | None = None) -> None:
        """Send as `WeightSender.send` describes."""
        unread: deque[int] = deque()  # slots that some receiver may still read, or has yet to
        unsent: deque[_Filled] = deque()  # the last of them, until the receivers have come

        def send_filled() -> None:
            while unsent:
                self._send(unsent[0])
                unsent.popleft()

        def free_slots() -> Iterator[Tensor]:
            for slot in itertools.cycle(range(SLOTS)):
                if slot in unread:
                    send_filled()
                    self._receive()
                    unread.popleft()
                yield self._slots[slot]

        try:
            filled = pack(named_tensors, free_slots(), self._dtype)
            for slot, (_, pieces) in zip(itertools.cycle(range(SLOTS)), filled):
                self._wait()
                unread.append(slot)
                unsent.append(_Filled(slot, pieces))
                if self._connections is not None:
                    send_filled()
            send_filled()
            end = End(None if log is None else log.read())
        except Exception as error:
            self._finish(End.after(error), len(unread) - len(unsent))
            raise

        _raise_faults(self._finish(end, len(unread)))

    def _finish(self, end: End, num_unread: int) -> list[str | None]:
        """Send the end; return the fault of every receiver, or None."""
        self._send(end)
        for _ in range(num_unread):
            self._receive()
        return self._receive()

    def _send(self, message: Any) -> None:
        connections = self._met()
        try:
            for connection in connections:
                connection.send(message)
        except OSError as error:
            raise RolloutError(_GONE) from error

    def _met(self) -> Sequence[Connection]:
        """Return the connections. The first call waits for receivers that are on their way."""
        if self._connections is None:
            self._connections = ()  # after an error here no receiver gets the end
            self._connections = self._share(self._connect())
        return self._connections

    def _receive(self) -> list[Any]:
        """Wait for the next message of every receiver."""
        try:
            return [connection.recv() for connection in self._met()]
        except (EOFError, OSError) as error:
            raise RolloutError(_GONE) from error


class SharedMemoryReceiver:
    """A `WeightReceiver`, the other end of a `SharedMemorySender`.

    Args:
        connection: to the sender.
        device: of the engine that takes the tensors, which may lie in host memory.
    """

    def __init__(self, connection: Connection, device: torch.device) -> None:
        self._connection = connection
        self._fingerprints: Mapping[str, int] | None = None
        self._wait = _wait_of(device)

        shared: _Memory = connection.recv()
        try:
            self._memory = self._open(shared, device)
        except Exception as error:
            self.report(describe_error(error))
            raise
        self.report(None)
        self._slots = self._memory.split(shared.bucket_bytes)

    def _open(self, shared: _Memory, device: torch.device) -> Tensor:
        """Map both buckets."""
        if shared.gpu is not None:
            return _open_on_gpu(shared)

        self._connection.send(os.getpid())
        descriptor = recv_handle(self._connection)
        memory = _map(descriptor, SLOTS * shared.bucket_bytes, pin=device.type == "cuda")
        os.close(descriptor)
        return memory

    def tensors(self) -> TensorStream:
        """Yield as `WeightReceiver.tensors` describes."""
        for bucket in self.buckets():
            yield from bucket

    def buckets(self) -> Iterator[TensorStream]:
        """Yield the tensors that each bucket completes. They are valid until the next bucket."""
        unpacker = Unpacker()
        self._fingerprints = None
        while isinstance(message := self._connection.recv(), _Filled):
            yield unpacker.unpack(self._slots[message.slot], message.pieces)
            self._wait()  # the engine's copies out of this bucket
            self._connection.send(message.slot)

        self._fingerprints = message.proof()

    def expected(self) -> Mapping[str, int] | None:
        """Return the sender's fingerprints, as `WeightReceiver.expected` describes."""
        return self._fingerprints

    def report(self, fault: str | None) -> None:
        """Report to the sender, as `WeightReceiver.report` describes."""
        self._connection.send(fault)


def _raise_faults(reports: Sequence[str | None]) -> None:
    faults = [fault for fault in reports if fault is not None]
    if faults:
        raise RolloutError(f"The rollout process did not take the weights. {' '.join(faults)}")


def receiver_at(address: str, key: bytes, device: torch.device) -> SharedMemoryReceiver:
    """Connect to the sender that listens at a local socket.

    Args:
        address: of the socket.
        key: proves to the sender that the caller may read its weights.
        device: of the engine that takes the tensors.
    """
    connection: Any = Client(address, family="AF_UNIX", authkey=key)
    return SharedMemoryReceiver(connection, device)


def _open_on_gpu(shared: _Memory) -> Tensor:
    """Map the sender's memory.

    The handle holds the GPU's number in the sender's process, which is replaced by the number here.
    It is passed by position, as pickle does: SGLang puts a function without names in torch's place.
    """
    assert shared.gpu is not None
    handle = list(shared.handle)
    handle[shared.device_at] = device_of(shared.gpu).index
    torch.cuda.init()
    return rebuild_cuda_tensor(*handle)


def _wait_of(device: torch.device, *, current: bool = False) -> Callable[[], None]:
    """Return a function that waits until the GPU's queued work is done.

    Args:
        device: the GPU. A CPU needs no waiting, unless:
        current: wait for this thread's GPU.
    """
    if device.type == "cuda":
        return partial(torch.cuda.synchronize, device)
    if current:
        return torch.cuda.synchronize
    return lambda: None


def _new_file(num_bytes: int) -> int:
    """Make a nameless file and return its descriptor.

    It is in memory where the system supports that, and not in /dev/shm, which may be small.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("verl_weights")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, num_bytes)
    return descriptor


def _map(descriptor: int, num_bytes: int, *, pin: bool) -> Tensor:
    """Map a file as bytes, pinned for a GPU if asked for."""
    memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    if pin:
        # A GPU copies from pageable memory at a fraction of the speed.
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr())
    return memory
