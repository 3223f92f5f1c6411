"""Weights from the ranks that train to the ranks that generate: who sends to whom, and how the two
ends find each other."""

import itertools
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from pathlib import Path

import torch

from verl.distributed.peers import PeerGroup, find_store, open_store
from verl.utils.errors import RolloutError
from verl.utils.logging import logger
from verl.weight_sync.base import WeightReceiver, WeightSender
from verl.weight_sync.broadcast import BroadcastReceiver, BroadcastSender
from verl.weight_sync.choice import Endpoint, Transport, choose_transport
from verl.weight_sync.disk import DiskReceiver, DiskSender
from verl.weight_sync.ipc import SharedMemoryReceiver, SharedMemorySender


@dataclass(frozen=True)
class Route:
    """One sender and the receivers that it serves by one transport. Ranks count within the trainer
    and within the rollout."""

    transport: Transport
    sender: int
    receivers: tuple[int, ...]
    host: str  # of the sender; the loopback address where all are on one machine


@dataclass(frozen=True)
class Meeting:
    """Where the receivers of a route find its sender."""

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
    senders of their machine. The log says which transport is taken, and why.

    Args:
        transport: taken instead of the one that fits best.
    """
    routes: dict[tuple[Transport, int], list[int]] = {}
    reasons: dict[Transport, str] = {}
    next_sender = itertools.count()
    for receiver, endpoint in enumerate(receivers):
        near = [
            number for number, sender in enumerate(senders) if sender.machine == endpoint.machine
        ]
        same_gpu = [
            number
            for number in near
            if endpoint.gpu is not None and senders[number].gpu == endpoint.gpu
        ]
        sender = 0
        if same_gpu:
            sender = same_gpu[0]
        elif near:
            sender = near[next(next_sender) % len(near)]

        way, reason = choose_transport(senders[sender], endpoint)
        if transport is not None:
            way, reason = transport, "actor_rollout_ref.rollout.weight_transport asks for it"
        if way == "broadcast":
            sender = 0  # one broadcast reaches all of them
        routes.setdefault((way, sender), []).append(receiver)
        reasons[way] = reason

    for way, reason in reasons.items():
        logger.info("Weights go to the rollout by %s: %s.", way, reason)
    return [
        Route(way, sender, tuple(served), _host_of(senders[sender], receivers, served))
        for (way, sender), served in routes.items()
    ]


def _host_of(sender: Endpoint, receivers: Sequence[Endpoint], served: Sequence[int]) -> str:
    is_one_machine = all(receivers[number].machine == sender.machine for number in served)
    return "127.0.0.1" if is_one_machine else sender.host


class Offer:
    """A sender's end of a route until its receivers have come.

    Args:
        route: which receivers, by which transport.
        device: of the sender's tensors.
        bucket_bytes: weights that travel at a time.
        dtype: of the receivers, for what is wider.
        folder: for the transport `disk`.
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
            # A path of a socket must be short, and the folder is this user's alone.
            sockets = tempfile.mkdtemp(prefix="verl-weights-")
            weakref.finalize(self, shutil.rmtree, sockets, ignore_errors=True)
            address = f"{sockets}/sender"
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

    def accept(self) -> WeightSender:
        """Wait for the receivers; gives the sender that serves them."""
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

        with self._listener as listener:
            connections = [listener.accept() for _ in route.receivers]
        return SharedMemorySender(
            connections,
            device=self._device if route.transport == "ipc" else torch.device("cpu"),
            bucket_bytes=self._bucket_bytes,
            dtype=self._dtype,
            pin=self._device.type == "cuda",
        )


def join(meeting: Meeting, receiver: int, device: torch.device) -> WeightReceiver:
    """Connect a receiver to the sender that waits at `meeting`.

    Args:
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
    connection = Client(meeting.address, family="AF_UNIX", authkey=meeting.key)
    return SharedMemoryReceiver(connection, device)
