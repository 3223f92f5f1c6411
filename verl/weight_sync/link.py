"""Link ranks that train to ranks that generate: plan who sends to whom, and connect both ends."""

import atexit
import itertools
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import torch

from verl.distributed.peers import PeerGroup, find_store, open_store
from verl.utils.errors import RolloutError
from verl.utils.logging import logger
from verl.utils.scratch import make_scratch, remove_scratch
from verl.weight_sync.base import WeightReceiver, WeightSender
from verl.weight_sync.broadcast import BroadcastReceiver, BroadcastSender
from verl.weight_sync.choice import Endpoint, Transport, choose_transport
from verl.weight_sync.disk import DiskReceiver, DiskSender
from verl.weight_sync.ipc import SharedMemorySender, receiver_at


@dataclass(frozen=True)
class Route:
    """One sender and the receivers that it serves by one transport.

    The sender's rank counts within the trainer, those of receivers within the rollout.
    """

    transport: Transport
    sender: int
    receivers: tuple[int, ...]
    host: str  # of the sender; the loopback address where all are on one machine


@dataclass(frozen=True)
class Meeting:
    """The address at which the receivers of a route reach its sender."""

    route: Route
    address: str  # of a host, a socket in the file system, or a folder
    port: int = 0
    key: bytes = b""  # both ends of a socket prove that they have it


def plan_routes(
    senders: Sequence[Endpoint],
    receivers: Sequence[Endpoint],
    transport: Transport | None = None,
) -> list[Route]:
    """Decide which rank that trains serves which rank that generates, and how.

    Every rank that trains has whole weights while it gathers, so receivers are spread over the
    senders of their machine. The transport and its reason are logged.

    Args:
        senders: the ranks that train.
        receivers: the ranks that generate.
        transport: used instead of the fastest one.
    """
    routes: dict[tuple[Transport, int], list[int]] = {}
    reasons: dict[Transport, str] = {}
    turn = itertools.count()

    for receiver, endpoint in enumerate(receivers):
        sender = _nearest(senders, endpoint, turn)
        way, reason = choose_transport(senders[sender], endpoint)
        if transport is not None:
            way = transport
            reason = "actor_rollout_ref.rollout.weight_transport asks for it"
        if way == "broadcast":
            sender = 0  # one broadcast reaches all of them
        routes.setdefault((way, sender), []).append(receiver)
        reasons[way] = reason

    for way, reason in reasons.items():
        logger.info("Weights go to the rollout by %s: %s.", way, reason)

    plan = []
    for (way, sender), served in routes.items():
        host = _host_of(senders[sender], receivers, served)
        plan.append(Route(way, sender, tuple(served), host))
    return plan


def _nearest(senders: Sequence[Endpoint], receiver: Endpoint, turn: Iterator[int]) -> int:
    """Choose the sender on the receiver's GPU, else the next in turn on its machine, else 0."""
    near = [number for number, each in enumerate(senders) if each.machine == receiver.machine]
    for number in near:
        if receiver.gpu is not None and senders[number].gpu == receiver.gpu:
            return number
    return near[next(turn) % len(near)] if near else 0


def _host_of(sender: Endpoint, receivers: Sequence[Endpoint], served: Sequence[int]) -> str:
    """Return the sender's address, or the loopback address if all are on its machine."""
    is_one_machine = all(receivers[number].machine == sender.machine for number in served)
    return "127.0.0.1" if is_one_machine else sender.host


_folders: dict[int, Path] = {}  # of sockets, by process: a fork gets its own
_socket_numbers = itertools.count()


def _socket_folder() -> Path:
    """Return this process's folder of sockets. It is private to this user, and its path is short.

    To make and to remove one takes 5 ms, so all offers of a process share it.
    """
    folder = _folders.get(os.getpid())
    if folder is None or not folder.is_dir():
        folder = _folders[os.getpid()] = make_scratch()
        atexit.register(remove_scratch, folder)
    return folder


class Offer:
    """A sender's end of a route until its receivers have connected.

    Args:
        route: the receivers and the transport.
        device: of the sender's tensors.
        bucket_bytes: size of a bucket of weights.
        dtype: of the receivers; wider tensors are cast.
        folder: of the weights, for the transport "disk".
    """

    def __init__(
        self,
        route: Route,
        *,
        device: torch.device,
        bucket_bytes: int,
        dtype: torch.dtype,
        folder: Path,
    ) -> None:
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype

        if route.transport in ("host", "ipc"):
            address = f"{_socket_folder()}/{next(_socket_numbers)}"
            key = secrets.token_bytes(32)
            self._listener = Listener(address, family="AF_UNIX", authkey=key)
            self.meeting = Meeting(route, address, key=key)
        elif route.transport == "broadcast":
            self._store, port = open_store(route.host)
            self.meeting = Meeting(route, route.host, port)
        elif route.transport == "disk":
            self.meeting = Meeting(route, str(folder))
        else:
            raise RolloutError(f"A rollout in another process cannot be served {route.transport}.")

    def accept(self, *, late: bool = False) -> WeightSender:
        """Wait for the receivers; return the sender that serves them.

        Args:
            late: do not wait here: the sender of a local socket fills its buckets before it does.
        """
        route = self.meeting.route
        if route.transport == "disk":
            return DiskSender(
                Path(self.meeting.address), bucket_bytes=self._bucket_bytes, dtype=self._dtype
            )
        if route.transport == "broadcast":
            peers = PeerGroup(self._store, 0, len(route.receivers) + 1, self._device)
            return BroadcastSender(
                peers, device=self._device, bucket_bytes=self._bucket_bytes, dtype=self._dtype
            )

        def connect() -> list[Connection]:
            with self._listener as listener:
                return [listener.accept() for _ in route.receivers]

        return SharedMemorySender(
            connect if late else connect(),
            device=self._device if route.transport == "ipc" else torch.device("cpu"),
            bucket_bytes=self._bucket_bytes,
            dtype=self._dtype,
            pin=self._device.type == "cuda",
        )


def join(meeting: Meeting, receiver: int, device: torch.device) -> WeightReceiver:
    """Connect a receiver to the sender that waits at `meeting`.

    Args:
        meeting: the address of the sender.
        receiver: number of this rank within the rollout.
        device: of the engine that takes the weights.
    """
    route = meeting.route
    if route.transport == "disk":
        return DiskReceiver(Path(meeting.address))
    if route.transport == "broadcast":
        store = find_store(meeting.address, meeting.port)
        rank = route.receivers.index(receiver) + 1
        peers = PeerGroup(store, rank, len(route.receivers) + 1, device)
        return BroadcastReceiver(peers, device=device)
    return receiver_at(meeting.address, meeting.key, device)
