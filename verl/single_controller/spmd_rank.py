"""A rank's side of backend `spmd`: how processes of torchrun find each other, and the loop of those that serve."""

import contextlib
import functools
import hmac
import os
import queue
import secrets
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.rendezvous import rendezvous

from verl.single_controller.breadcrumbs import format_stacks, keep_breadcrumbs, read_breadcrumbs
from verl.single_controller.dispatch import Arguments
from verl.single_controller.host import Host, OnTold, Raised
from verl.single_controller.wire import Incoming, Kind, Link
from verl.utils.errors import ConfigError, WorkerLostError
from verl.utils.sigterm import handle_sigterm

_TOKEN_BYTES = 32
_STALL_S = 60  # within a message: a peer that neither takes nor gives a byte for so long is gone
_TERM_GRACE_S = 5.0  # after SIGTERM: for the driver to ask where this rank is, which it would not know otherwise


@dataclass
class Peer:
    """Another rank, as the driver knows it."""

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


def launched_rank() -> tuple[int, int]:
    """(rank, world size) that the environment tells; (0, 1) of a process that was started by hand."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return 0, 1
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={world_size} says that several ranks were launched, but {' and '.join(missing)} of the "
            "environment are not set. Launch with torchrun, which sets them, or unset WORLD_SIZE for one process."
        )
    return int(os.environ["RANK"]), world_size


def _store(timeout_s: float) -> PrefixStore:
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return PrefixStore("verl/single_controller", store)


# ---------------------------------------------------------------- the driver's side


def connect_all(world_size: int, timeout_s: float) -> tuple[dict[int, Peer], Path]:
    """Wait for all other ranks; gives them, and the folder that notes are kept in."""
    store = _store(timeout_s)
    token = secrets.token_hex(_TOKEN_BYTES // 2)
    folder = Path(tempfile.mkdtemp(prefix="verl-"))
    listeners = [socket.socket(socket.AF_UNIX)]
    listeners[0].bind(str(folder / "driver"))
    port = 0
    if os.environ.get("LOCAL_WORLD_SIZE", "") != str(world_size):  # ranks of other machines come by TCP
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listeners.append(socket.create_server(("", 0), family=family, dualstack_ipv6=both))
        port = listeners[1].getsockname()[1]
    listeners[0].listen(world_size)
    store.set("token", token)
    store.set("folder", str(folder))
    store.set("port", str(port))
    peers: dict[int, Peer] = {}
    ends_at = time.monotonic() + timeout_s
    while len(peers) < world_size - 1:
        for listener in listeners:
            listener.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                peers |= _accept(listener.accept()[0], token.encode())
        if time.monotonic() > ends_at:
            shutil.rmtree(folder)
            missing = sorted(set(range(1, world_size)) - set(peers))
            raise WorkerLostError(f"Ranks {missing} of {world_size} did not come within {timeout_s:g} s.")
    for listener in listeners:
        listener.close()
    return peers, folder


def _accept(connection: socket.socket, token: bytes) -> dict[int, Peer]:
    """Messages are pickles, so nobody is listened to who does not know the token of this run."""
    _limit_stalls(connection)
    try:
        given = connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL)
        if not hmac.compare_digest(given, token):
            connection.close()
            return {}
        link = Link(connection)
        rank, machine, pid = link.receive().value()
    except (OSError, EOFError):  # somebody else's knock, or a rank that has died already and will be missed
        connection.close()
        return {}
    return {rank: Peer(link, machine, pid)}


def _limit_stalls(connection: socket.socket) -> None:
    """For `_STALL_S` within a message; between messages the receiver waits in `select`."""
    connection.setblocking(True)
    limit = struct.pack("ll", _STALL_S, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


class LocalRank:
    """Rank 0: a thread of the driver's process, so that the driver can wait for it with a deadline as for others."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._unfinished, self._counting = 0, threading.Lock()
        self.idle = threading.Event()
        self.idle.set()
        threading.Thread(target=self._work, name="rank 0", daemon=True).start()

    def submit(self, role: str, method: str, arguments: Arguments, on_told: OnTold) -> Future:
        future: Future = Future()
        self._count(1)
        self._jobs.put((future, role, method, arguments, on_told))
        return future

    def _count(self, change: int) -> None:
        with self._counting:
            self._unfinished += change
            (self.idle.clear if self._unfinished else self.idle.set)()

    def _work(self) -> None:
        while True:
            future, role, method, (args, kwargs), on_told = self._jobs.get()
            try:
                end: Any = functools.partial(_itself, self.host.run(role, method, args, kwargs, on_told))
            except BaseException as error:  # noqa: BLE001 - a border: the driver raises it
                end = Raised.from_error(error)
            self._count(-1)
            future.set_result(end)
            del future, args, kwargs, end, on_told  # or this thread would hold a batch until the next call


def _itself(value: Any) -> Any:
    return value


# ---------------------------------------------------------------- the side of those that serve


def serve(rank: int, connect_timeout_s: float) -> None:
    """Run the driver's calls on the main thread until it says to end."""
    store = _store(connect_timeout_s)
    token, folder, port = store.get("token"), Path(store.get("folder").decode()), int(store.get("port"))
    link = Link(_connect(folder, port, token))
    keep_breadcrumbs(folder, rank)
    link.send(Kind.HELLO, 0, (rank, socket.gethostname(), os.getpid()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the driver decides
    handle_sigterm(_leave_later)
    calls: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_watch, args=(link, calls, folder), name="verl-watch", daemon=True).start()
    host = Host()
    while True:
        message = calls.get()
        if message.kind is Kind.END:
            link.send(Kind.BYE, message.number, None)
            if not link.same_machine:
                shutil.rmtree(folder, ignore_errors=True)
            return
        _answer(link, host, message)
        del message  # its memory is the batch


def _connect(folder: Path, port: int, token: bytes) -> socket.socket:
    """By a local socket where the driver's is here; another machine has none of that name."""
    try:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(folder / "driver"))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        connection = socket.create_connection((os.environ["MASTER_ADDR"], port))
    connection.sendall(token)
    return connection


def _answer(link: Link, host: Host, message: Incoming) -> None:
    try:
        role, method, is_heard, args, kwargs = message.value()
        on_told = functools.partial(link.send, Kind.TOLD, message.number) if is_heard else None
        answer = host.run(role, method, args, kwargs, on_told)
        link.send(Kind.RESULT, message.number, answer)
    except BaseException as error:  # noqa: BLE001 - a process border: the driver raises it
        link.send(Kind.RAISED, message.number, Raised.from_error(error))


def _watch(link: Link, calls: queue.SimpleQueue, folder: Path) -> None:
    """Receives, and answers where the main thread is, whatever that is at. Ends the process with the driver."""
    while True:
        try:
            message = link.receive()
        except (OSError, EOFError):
            os._exit(1)  # the main thread may be in a collective that nobody will join
        if message.kind is Kind.ABORT:
            sys.stdout.flush()
            os._exit(1)
        if message.kind is Kind.ASK_STACKS:
            link.send(Kind.STACKS, message.number, (format_stacks(), read_breadcrumbs(folder)))
            continue
        calls.put(message)
        if message.kind is Kind.END:
            return
        del message


def _leave_later(signum: int, frame: Any) -> None:
    """torchrun ends all ranks when one dies; the driver, which tells why, asks this one first and ends it itself."""
    leave = threading.Timer(_TERM_GRACE_S, os._exit, (128 + signum,))
    leave.daemon = True
    leave.start()
