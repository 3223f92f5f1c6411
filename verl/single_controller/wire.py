"""Messages between a driver and its ranks: what is large goes through memory that both map, never
through the socket.

A value is pickled once, its tensors and arrays as buffers beside the pickle. Between processes of
one machine they lie in an anonymous file (memfd) whose descriptor travels: nothing has a name that
could leak, and `/dev/shm` may be small. Between machines, where the system has no memfd, and where
they are larger than a file may be (`ulimit -f`), they follow on the socket. Whoever has received a
value owns it: memory is mapped copy-on-write.
"""

import io
import mmap
import os
import pickle
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from verl.utils.limits import largest_file
from verl.utils.pickling import pack_tensor, unpack_tensor

_HEADER = struct.Struct("<BQIB")  # kind, number, parts, whether they lie in memory
# less than what a socket takes at once; mapping memory costs more than copying so little
_INLINE_BYTES = 32 * 1024
_ALIGNMENT = 64  # of every buffer, as torch's own allocator aligns


class Kind(IntEnum):
    """What a message is about."""

    HELLO = 0  # rank, machine, pid
    CALL = 1
    RESULT = 2
    RAISED = 3
    ASK_STACKS = 4
    STACKS = 5
    END = 6  # finish what was asked, then leave
    BYE = 7
    ABORT = 8  # leave at once
    TOLD = 9  # by a call that is still running
    ASK_ALIVE = 10  # from a rank to the driver
    ALIVE = 11


class Pickler(pickle.Pickler):
    """Tensors outside a DataProto as buffers too, and a received message as the value in it, which
    is not unpickled."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Incoming:
            return _value_in, tuple(map(pickle.PickleBuffer, obj.parts))
        packed = pack_tensor(obj) if type(obj) is torch.Tensor and not obj.requires_grad else obj
        return (
            NotImplemented
            if packed is obj or isinstance(packed, torch.Tensor)
            else (unpack_tensor, (packed,))
        )


class Outgoing:
    """A value on its way to one process or to several; its bytes are written once."""

    def __init__(self, value: Any, pickler: type[pickle.Pickler] = Pickler) -> None:
        head, buffers = io.BytesIO(), []
        pickler(head, protocol=5, buffer_callback=buffers.append).dump(value)
        self.parts: list[memoryview] = [head.getbuffer(), *(buffer.raw() for buffer in buffers)]
        self.sizes = [len(part) for part in self.parts]
        self._memory: int | None = None

    def in_memory(self) -> int:
        """The descriptor of a memfd with all parts."""
        if self._memory is None:
            self._memory = os.memfd_create("verl")
            weakref.finalize(self, os.close, self._memory)
            for part, offset in zip(self.parts, _offsets(self.sizes)):
                while part:
                    written = os.pwrite(self._memory, part, offset)
                    part, offset = part[written:], offset + written
        return self._memory


@dataclass(frozen=True)
class Incoming:
    """A message as it came; `value()` unpickles it, its tensors lying in what was received."""

    kind: Kind
    number: int
    parts: Sequence[memoryview]

    def value(self) -> Any:
        return _value_in(*self.parts)


class Link:
    """One end of a connection. Threads may send at the same time; one receives."""

    def __init__(self, connection: socket.socket, pickler: type[pickle.Pickler] = Pickler) -> None:
        self.socket, self._pickler = connection, pickler
        self.same_machine = connection.family == getattr(socket, "AF_UNIX", None)
        self._shares_memory = self.same_machine and hasattr(os, "memfd_create")
        # a signal handler may send while the thread it interrupts does
        self._sending = threading.RLock()
        if not self.same_machine:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A machine that is gone closes no connection: asked after half a minute of silence,
            # given up after one.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}.items():
                if hasattr(socket, name):  # macOS lacks some
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        # A child that lives on with a copy of the socket would hide the death of its parent.
        forget = weakref.WeakMethod(self.close)
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())

    def send(self, kind: Kind, number: int, value: Any) -> None:
        """`value`: anything that pickles, or an Outgoing that goes to several."""
        message = value if isinstance(value, Outgoing) else Outgoing(value, self._pickler)
        in_memory = self._shares_memory and _INLINE_BYTES < _end(message.sizes) <= largest_file()
        head = _HEADER.pack(kind, number, len(message.sizes), in_memory)
        head += struct.pack(f"<{len(message.sizes)}Q", *message.sizes)
        with self._sending:
            if in_memory:
                socket.send_fds(self.socket, [head[:1]], [message.in_memory()])
                self.socket.sendall(head[1:])
            else:
                padded = [
                    piece
                    for part in message.parts
                    for piece in (part, bytes(-len(part) % _ALIGNMENT))
                ]
                pieces = [head, *padded[:-1]]
                for piece in [b"".join(pieces)] if _end(message.sizes) <= _INLINE_BYTES else pieces:
                    self.socket.sendall(piece)

    def receive(self) -> Incoming:
        """The next message. Raises OSError or EOFError when there is nobody at the other end any
        more."""
        descriptors: list[int] = []
        if self.same_machine:
            first, descriptors, _, _ = socket.recv_fds(self.socket, 1, 1)
        else:
            first = self.socket.recv(1)
        if not first:
            raise EOFError("the connection was closed")
        kind, number, num_parts, in_memory = _HEADER.unpack(
            first + bytes(self._exactly(_HEADER.size - 1))
        )
        sizes = struct.unpack(f"<{num_parts}Q", self._exactly(8 * num_parts))
        if in_memory:
            (descriptor,) = descriptors
            data: Any = mmap.mmap(descriptor, _end(sizes), access=mmap.ACCESS_COPY)
            os.close(descriptor)
        else:
            data = self._exactly(_end(sizes))
        view = memoryview(data)
        parts = [view[start : start + size] for start, size in zip(_offsets(sizes), sizes)]
        return Incoming(Kind(kind), number, parts)

    def close(self) -> None:
        self.socket.close()

    def _exactly(self, size: int) -> memoryview:
        # aligned, and not zeroed
        data, received = torch.empty(size, dtype=torch.uint8).numpy().data, 0
        while received < size:
            count = self.socket.recv_into(data[received:])
            if not count:
                raise EOFError("the connection was closed within a message")
            received += count
        return data


def _value_in(head: memoryview, *buffers: memoryview) -> Any:
    return pickle.loads(head, buffers=buffers)


def _offsets(sizes: Sequence[int]) -> list[int]:
    offsets, position = [], 0
    for size in sizes:
        offsets.append(position)
        position += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets


def _end(sizes: Sequence[int]) -> int:
    return _offsets(sizes)[-1] + sizes[-1]
