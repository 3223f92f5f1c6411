"""Connections between a driver and its ranks: how they find each other, and waits for answers."""

import contextlib
import functools
import hmac
import os
import pickle
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from verl.single_controller.calls import Ends, Lost
from verl.single_controller.host import Host, OnEmit, Raised
from verl.single_controller.shares import Arguments
from verl.single_controller.wire import (
    UNREACHABLE_S,
    Incoming,
    Kind,
    Link,
    Outgoing,
    Pickler,
)
from verl.utils.errors import WorkerLostError
from verl.utils.scratch import make_scratch

_TOKEN_BYTES = 32
_TOKEN_FILE = "token"
_KNOCK_S = 5  # for a new connection to identify itself; strangers may stay silent
_STALL_S = 60  # a peer that moves no byte of a message for so long is gone
_POLL_S = 0.5  # between checks for deaths of ranks that a call does not wait for


@dataclass
class Peer:
    """Another rank, as seen by the driver."""

    link: Link
    machine: str
    pid: int
    leaving: bool = False

    @property
    def on_this_machine(self) -> bool:
        return self.link.same_machine

    @property
    def place(self) -> str:
        return f"{self.machine}, pid {self.pid}"


Peers = dict[int, Peer]  # by rank


# ---------------------------------------------------------------- how they find each other


class Entrance(NamedTuple):
    """Addresses at which ranks reach the driver of their run."""

    folder: str  # has a local socket on the driver's machine
    address: str
    port: int
    token: str


class Door:
    """The driver's side of an entrance: a local socket and, for other machines, a port."""

    def __init__(self, size: int, other_machines: bool) -> None:
        self.folder = str(make_scratch())
        self.token = secrets.token_hex(_TOKEN_BYTES // 2)
        self.port = 0
        _write_token(Path(self.folder), self.token)

        listeners = [socket.socket(socket.AF_UNIX)]
        listeners[0].bind(str(Path(self.folder) / "driver"))
        if other_machines:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listeners.append(socket.create_server(("", 0), family=family, dualstack_ipv6=both))
            self.port = listeners[1].getsockname()[1]

        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.listen(size)
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, listener)

    def admit(self) -> Peers:
        """Return the ranks that connect within a moment."""
        came: Peers = {}
        for key, _ in self._selector.select(0.05):
            with contextlib.suppress(OSError):  # it has disconnected again
                came |= _accept(key.data.accept()[0], self.token.encode())
        return came

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.data.close()
        self._selector.close()


def _write_token(folder: Path, token: str) -> None:
    descriptor = os.open(folder / _TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token)


def read_token(folder: Path) -> str:
    """Return the token of a driver on this machine.

    Raises WorkerLostError if the folder belongs to another user, who could make this process
    unpickle anything.
    """
    file = folder / _TOKEN_FILE
    try:
        owner = file.stat().st_uid
        token = file.read_text()
    except OSError as error:
        raise WorkerLostError(
            f"Expected the driver's token in {file}, which cannot be read ({error.strerror}). Give "
            "all ranks of a machine the same user and the same TMPDIR."
        ) from error

    if owner != os.getuid() or folder.stat().st_uid != os.getuid():
        raise WorkerLostError(
            f"The driver's folder {folder} must belong to user {os.getuid()}, who runs this rank, "
            f"and belongs to user {owner}. Start all ranks of a launch as the same user."
        )

    return token


def _accept(connection: socket.socket, token: bytes) -> Peers:
    """Accept a rank that knows the token of this run. Messages are pickles, so refuse others."""
    _limit_stalls(connection, _KNOCK_S)
    try:
        given = connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
        if not hmac.compare_digest(given, token):
            connection.close()
            return {}
        link = Link(connection)
        rank, machine, pid = link.receive().value()
    except (OSError, EOFError):  # a stranger, or a rank that has died and will be missing
        connection.close()
        return {}
    _limit_stalls(connection, _STALL_S)
    return {rank: Peer(link, machine, pid)}


def _limit_stalls(connection: socket.socket, seconds: int) -> None:
    """Limit the wait within a message; between messages the receiver waits in `select`."""
    connection.setblocking(True)
    limit = struct.pack("ll", seconds, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def connect(
    entrance: Entrance, rank: int, timeout_s: float, pickler: type[pickle.Pickler] = Pickler
) -> Link:
    """Connect a rank with its driver, by the local socket if it exists on this machine.

    Raises OSError if the driver cannot be reached.
    """
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        connection.connect(str(Path(entrance.folder) / "driver"))
    except OSError:  # of another machine, or of another user
        connection.close()
        connection = socket.create_connection((entrance.address, entrance.port), timeout_s)
    connection.settimeout(None)
    connection.sendall(entrance.token.encode())
    link = Link(connection, pickler)
    link.send(Kind.HELLO, 0, (rank, socket.gethostname(), os.getpid()))
    return link


# ---------------------------------------------------------------- calls


def answer(link: Link, host: Host, message: Incoming) -> None:
    """Run the call of a message, and send its answer."""
    try:
        role, method, is_heard, args, kwargs = message.value()
        on_emit = functools.partial(link.send, Kind.EMITTED, message.number) if is_heard else None
        value = host.run(role, method, args, kwargs, on_emit)
        link.send(Kind.RESULT, message.number, value)
    except BaseException as error:  # noqa: BLE001 - a process border: the driver raises it
        link.send(Kind.RAISED, message.number, Raised.from_error(error))


class Links:
    """The driver's end of each connection, by rank.

    A separate thread receives, so that answers and deaths are noticed while the driver is busy.
    A reply becomes a Lost, a Raised, or a function that returns the answer.
    """

    def __init__(self, peers: Peers, pickler: type[pickle.Pickler] = Pickler) -> None:
        self.peers = peers
        self._pickler = pickler
        self.lost: dict[int, Lost] = {}
        self.news = threading.Event()  # a rank is lost that was not asked to leave
        # (rank, number of the message): its answer, and the receiver of `emit` before it
        self.pending: dict[tuple[int, int], tuple[Future, OnEmit]] = {}
        # A signal handler may send while the thread that it interrupts does.
        self._lock = threading.RLock()
        self._numbers = iter(range(1, sys.maxsize))
        threading.Thread(target=self._receive, name="verl-watch", daemon=True).start()

    def call(
        self, role: str, method: str, arguments: Mapping[int, Arguments], on_emit: OnEmit
    ) -> dict[int, Future]:
        """Start a method on some ranks."""
        # All are pickled before one is sent: a pickling error is raised before any rank starts.
        is_heard = on_emit is not None
        messages: dict[int, Outgoing] = {}
        for share in arguments.values():
            if id(share) not in messages:
                messages[id(share)] = Outgoing((role, method, is_heard, *share), self._pickler)

        replies = {}
        for rank, share in arguments.items():
            replies[rank] = self.send(rank, Kind.CALL, messages[id(share)], on_emit)
        return replies

    def send(self, rank: int, kind: Kind, message: Outgoing, on_emit: OnEmit = None) -> Future:
        """Send a message; return the future of its answer."""
        number = next(self._numbers)
        future = Future()
        with self._lock:
            if rank in self.lost:
                future.set_result(self.lost[rank])
                return future
            self.pending[rank, number] = future, on_emit

        try:
            self.peers[rank].link.send(kind, number, message)
        except OSError as error:
            self._lose(rank, f"it takes no messages ({error})")
        return future

    def wait(self, replies: Mapping[int, Future], timeout_s: float) -> Ends:
        """Implement `Ranks.wait`."""
        ends_at = time.monotonic() + timeout_s
        waiting = set(replies.values())
        while waiting:
            left = ends_at - time.monotonic()
            done, waiting = wait(waiting, min(max(left, 0.0), _POLL_S), FIRST_COMPLETED)
            if left <= 0 or self.lost or any(not callable(future.result()) for future in done):
                break

        ended: Ends = {}
        for rank, future in replies.items():
            if future.done():
                end = future.result()
                ended[rank] = None if callable(end) else end
        # A death also ends calls without the dead rank, because the group is incomplete.
        return ended | self.lost if waiting else ended

    def _receive(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, peer in self.peers.items():
                selector.register(peer.link.socket, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    rank = key.data
                    try:
                        self._take(rank, self.peers[rank].link.receive())
                    except (OSError, EOFError) as error:
                        selector.unregister(key.fileobj)
                        self._lose(rank, _reason_of(error))

    def _take(self, rank: int, message: Incoming) -> None:
        if message.kind is Kind.ASK_ALIVE:
            self.peers[rank].link.send(Kind.ALIVE, message.number, None)
            return

        key = (rank, message.number)
        if message.kind is Kind.EMITTED:
            with self._lock:
                _, on_emit = self.pending.get(key, (None, None))
            if on_emit is not None:
                on_emit(message.value())
            return

        with self._lock:
            future, _ = self.pending.pop(key, (None, None))
        if future is not None:
            future.set_result(message.value() if message.kind is Kind.RAISED else message.value)

    def _lose(self, rank: int, reason: str) -> None:
        with self._lock:
            lost = self.lost.setdefault(rank, Lost(reason))
            futures = [self.pending.pop(key)[0] for key in list(self.pending) if key[0] == rank]
        if not self.peers[rank].leaving:
            self.news.set()
        for future in futures:
            future.set_result(lost)


def _reason_of(error: OSError | EOFError) -> str:
    """Describe why a connection ended."""
    if isinstance(error, EOFError | ConnectionError):
        return str(error)
    return (
        f"no packet came from its machine for {UNREACHABLE_S} s ({error}). The machine is down, or "
        "the network to it is cut"
    )
