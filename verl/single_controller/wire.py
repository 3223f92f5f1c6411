"""Messages between a driver and its ranks; large values go through shared memory.

A value is pickled once, with its tensors and arrays as separate buffers. Between processes of one
machine the buffers are in an anonymous file (memfd), and only its descriptor is sent: no name can
leak, and `/dev/shm` may be small. The buffers go through the socket between machines, if the system
has no memfd, and if they exceed the largest size of a file (`ulimit -f`). The receiver of a value
owns it: memory is mapped copy-on-write.
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

from verl.utils.arithmetic import round_up
from verl.utils.limits import largest_file
from verl.utils.pickling import pack_tensor, unpack_tensor

_HEADER = struct.Struct("<BQIB")  # kind, number, parts, whether they are in shared memory
# This fits into a socket's buffer; for so few bytes, mapping memory costs more than copying.
_INLINE_BYTES = 32 * 1024
UNREACHABLE_S = 30  # without a packet of another machine, until its connections are given up
_ALIGNMENT = 64  # of every buffer, as torch's own allocator aligns


class Kind(IntEnum):
    """Kind of a message."""

    HELLO = 0  # rank, machine, pid
    CALL = 1
    RESULT = 2
    RAISED = 3
    ASK_STACKS = 4
    STACKS = 5
    END = 6  # finish all calls, then leave
    BYE = 7
    ABORT = 8  # leave at once
    EMITTED = 9  # a value of `emit`, from a call that is still running
    ASK_ALIVE = 10  # from a rank to the driver
    ALIVE = 11


class Pickler(pickle.Pickler):
    """Pickle tensors outside of a DataProto as buffers too.

    A received message is forwarded as the value in it, without unpickling.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Incoming:
            return _value_in, tuple(map(pickle.PickleBuffer, obj.parts))
        if type(obj) is torch.Tensor and not obj.requires_grad:
            packed = pack_tensor(obj)
            if not isinstance(packed, torch.Tensor):
                return unpack_tensor, (packed,)
        return NotImplemented


class Outgoing:
    """A value to send to one process or several; its bytes are written once."""

    def __init__(self, value: Any, pickler: type[pickle.Pickler] = Pickler) -> None:
        head = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        pickler(head, protocol=5, buffer_callback=buffers.append).dump(value)
        self.parts: list[memoryview] = [head.getbuffer(), *(buffer.raw() for buffer in buffers)]
        self.sizes = [len(part) for part in self.parts]
        self._memory: int | None = None

    def in_memory(self) -> int:
        """Return the descriptor of a memfd that holds all parts."""
        if self._memory is None:
            self._memory = os.memfd_create("verl")
            weakref.finalize(self, os.close, self._memory)
            for part, offset in zip(self.parts, _offsets(self.sizes)):
                done = 0
                while done < len(part):
                    done += os.pwrite(self._memory, part[done:], offset + done)
        return self._memory


@dataclass(frozen=True)
class Incoming:
    """A received message; `value()` unpickles it, with its tensors in the received memory."""

    kind: Kind
    number: int
    parts: Sequence[memoryview]

    def value(self) -> Any:
        return _value_in(*self.parts)


class Link:
    """One end of a connection. Threads may send at the same time; one receives."""

    def __init__(self, connection: socket.socket, pickler: type[pickle.Pickler] = Pickler) -> None:
        self.socket = connection
        self._pickler = pickler
        self.same_machine = connection.family == getattr(socket, "AF_UNIX", None)
        self._shares_memory = self.same_machine and hasattr(os, "memfd_create")
        # A signal handler may send while the thread that it interrupts does.
        self._sending = threading.RLock()
        if not self.same_machine:
            _set_tcp_options(connection)
        # A child that outlives its parent with a copy of the socket would hide the parent's death.
        forget = weakref.WeakMethod(self.close)
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())

    def send(self, kind: Kind, number: int, value: Any) -> None:
        """Send a value that pickles, or an Outgoing, which may go to several links."""
        message = value if isinstance(value, Outgoing) else Outgoing(value, self._pickler)
        size = _end(message.sizes)
        in_memory = self._shares_memory and _INLINE_BYTES < size <= largest_file()
        head = _HEADER.pack(kind, number, len(message.sizes), in_memory)
        head += struct.pack(f"<{len(message.sizes)}Q", *message.sizes)

        with self._sending:
            if in_memory:
                socket.send_fds(self.socket, [head[:1]], [message.in_memory()])
                self.socket.sendall(head[1:])
                return

            pieces: list[Any] = [head]
            for part in message.parts:
                pieces += [part, bytes(-len(part) % _ALIGNMENT)]
            pieces.pop()  # the last part needs no padding
            if size <= _INLINE_BYTES:
                pieces = [b"".join(pieces)]
            for piece in pieces:
                self.socket.sendall(piece)

    def receive(self) -> Incoming:
        """Return the next message. Raises OSError or EOFError when the other end is gone."""
        descriptors: list[int] = []
        if self.same_machine:
            first, descriptors, _, _ = socket.recv_fds(self.socket, 1, 1)
        else:
            first = self.socket.recv(1)
        if not first:
            raise EOFError("the connection was closed")

        header = first + bytes(self._exactly(_HEADER.size - 1))
        kind, number, num_parts, in_memory = _HEADER.unpack(header)
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

    def pid_of_peer(self) -> int | None:
        """Return the other end's process id from the kernel; None if it is on another machine."""
        if not self.same_machine or not hasattr(socket, "SO_PEERCRED"):
            return None
        credentials = struct.Struct("3i")
        found = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
        return credentials.unpack(found)[0]

    def _exactly(self, size: int) -> memoryview:
        data = torch.empty(size, dtype=torch.uint8).numpy().data  # aligned, and not zeroed
        received = 0
        while received < size:
            count = self.socket.recv_into(data[received:])
            if not count:
                raise EOFError("the connection was closed within a message")
            received += count
        return data


def _set_tcp_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A machine that is gone closes no connection: probe it, and give up where no packet comes back.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = 4
    pause_s = UNREACHABLE_S // (probes + 2)
    options = {
        "TCP_KEEPIDLE": 2 * pause_s,
        "TCP_KEEPINTVL": pause_s,
        "TCP_KEEPCNT": probes,
        "TCP_USER_TIMEOUT": UNREACHABLE_S * 1000,  # of a message that is not acknowledged
    }
    for name, value in options.items():
        if hasattr(socket, name):  # macOS lacks some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _value_in(head: memoryview, *buffers: memoryview) -> Any:
    return pickle.loads(head, buffers=buffers)


def _offsets(sizes: Sequence[int]) -> list[int]:
    offsets = []
    position = 0
    for size in sizes:
        offsets.append(position)
        position += round_up(size, _ALIGNMENT)
    return offsets


def _end(sizes: Sequence[int]) -> int:
    return _offsets(sizes)[-1] + sizes[-1]
