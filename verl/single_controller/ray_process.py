"""A rank as a Ray actor: its process, and its connection with the driver."""

import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.client import ray as ray_client

from verl.single_controller.breadcrumbs import format_stacks, keep_breadcrumbs, read_breadcrumbs
from verl.single_controller.host import Host, Raised
from verl.single_controller.links import Door, Entrance, Links, Peers, answer, connect
from verl.single_controller.rank_thread import RankThread
from verl.single_controller.shares import Args, Kwargs, each_argument
from verl.single_controller.wire import UNREACHABLE_S, Link, Pickler
from verl.utils.errors import WorkerError
from verl.utils.logging import say_once
from verl.utils.rendezvous import free_port
from verl.utils.scratch import hold_scratch, remove_left_behind, remove_scratch

_REACH_S = 5.0  # for an actor to reach the driver, which it does in milliseconds or never
_CONNECT_S = 10.0  # for all actors
_POLL_S = 0.25  # until the end of a driver whose connection is lost

# role, method, arguments, whether values of `emit` are sent
Call = tuple[str, str, Args, Kwargs, bool]


class Place(NamedTuple):
    """Machine and process of an actor."""

    machine: str
    address: str
    free_port: int
    pid: int
    node_id: str


class HandedOn(NamedTuple):
    """A stand-in for the answer of another call in arguments; the answer goes from rank to rank."""

    answer: Any  # its reference


class RankError(WorkerError, RayError):
    """The answer of a call that raised.

    `ray.get` raises every RayError that it gets as a value. If `run` raised this itself, Ray would
    log the second value, which nothing reads, as an unhandled error.
    """

    def __init__(self, raised: Raised) -> None:
        super().__init__(f"{raised.summary}\n{raised.traceback}")
        self.raised = raised

    def __reduce__(self) -> Any:
        return RankError, (self.raised,)


class ByValue(Pickler, cloudpickle.CloudPickler):
    """Pickle functions and classes of the driver's program, or made in a function, as code.

    Ray does the same.
    """

    def reducer_override(self, obj: Any) -> Any:
        reduced = Pickler.reducer_override(self, obj)
        if reduced is NotImplemented:
            return cloudpickle.CloudPickler.reducer_override(self, obj)
        return reduced


class RankProcess:
    """The actor. Calls run one by one; methods of the group "watch" answer at any time."""

    def __init__(self, rank: int, world_size: int, folder: str, outlives_driver: bool) -> None:
        self.rank = rank
        self.outlives_driver = outlives_driver
        self.folder = Path(folder)
        self.emitted: deque[Any] = deque()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        remove_left_behind()
        hold_scratch(self.folder)
        keep_breadcrumbs(self.folder, rank)
        self.host = Host()
        self.calls = RankThread(f"rank {rank}")

    def place(self) -> Place:
        address = ray.util.get_node_ip_address()
        node = ray.get_runtime_context().get_node_id()
        return Place(socket.gethostname(), address, free_port(""), os.getpid(), node)

    def set_environment(self, values: dict[str, str], defaults: dict[str, str]) -> None:
        """Set `values`, and those of `defaults` that this node or its runtime_env has not set."""
        os.environ.update({**defaults, **os.environ, **values})

    def connect(self, entrance: Entrance) -> str | None:
        """Also accept calls from the driver over a connection; return the reason of a failure."""
        try:
            link = connect(entrance, self.rank, _REACH_S, ByValue)
        except OSError as error:
            return str(error)
        threading.Thread(target=self._receive, args=(link,), name="verl-watch", daemon=True).start()
        return None

    def _receive(self, link: Link) -> None:
        driver = _process_of(link)
        try:
            while True:
                self.calls.submit(functools.partial(answer, link, self.host, link.receive()))
        except (ConnectionError, EOFError):
            # Ray ends actors that are not detached, some time later.
            if driver is not None and not self.outlives_driver:
                self._end_after(driver)
        except OSError as error:
            if self.outlives_driver:
                return
            # Ray takes minutes to end the processes of a machine that it does not reach.
            print(
                f"WorkerLostError: rank {self.rank} has had no packet from the driver's machine "
                f"for {UNREACHABLE_S} s ({error}) and ends. Check the network between them.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)

    def _end_after(self, driver: psutil.Process) -> None:
        """Wait for the end of the driver's process, then end this one.

        A connection may be lost while the driver lives.
        """
        while _lives(driver):
            time.sleep(_POLL_S)
        remove_scratch(self.folder)
        sys.stdout.flush()
        os._exit(1)

    @ray.method(num_returns=2)
    def run(self, call: Call | bytes) -> tuple[Any, None]:
        """Run a method; return its answer or a RankError, and None.

        The second value shows that the call has ended, without the memory of the answer.
        """
        self.emitted.clear()
        try:
            opened = cloudpickle.loads(call) if isinstance(call, bytes) else call
            role, method, args, kwargs, is_heard = opened
            args, kwargs = each_argument(_opened, args, kwargs)
            on_emit = self.emitted.append if is_heard else None
            job = functools.partial(self.host.run, role, method, args, kwargs, on_emit)
            end = self.calls.submit(job).result()
            return RankError(end) if isinstance(end, Raised) else end(), None
        except BaseException as error:  # noqa: BLE001 - a process border: the driver raises it
            return RankError(Raised.from_error(error)), None

    def finish(self) -> None:
        """Wait until all calls have ended, by Ray and by the connection. Ray then ends the process."""
        self.calls.submit(lambda: None).result()
        remove_scratch(self.folder)

    @ray.method(concurrency_group="watch")
    def whereabouts(self) -> tuple[str, dict[int, str]]:
        """Return the stacks of this process, and the last notes of all ranks of this machine."""
        return format_stacks(), read_breadcrumbs(self.folder)

    @ray.method(concurrency_group="watch")
    def take_emitted(self) -> list[Any]:
        """Return the values of `emit` since the last time, from the call that is running."""
        return [self.emitted.popleft() for _ in range(len(self.emitted))]

    @ray.method(concurrency_group="watch")
    def kill_neighbor(self, pid: int) -> None:
        kill_rank(pid)


def _process_of(link: Link) -> psutil.Process | None:
    """Return the driver's process if it is on this machine."""
    pid = link.pid_of_peer()
    try:
        return psutil.Process(pid) if pid else None
    except psutil.NoSuchProcess:  # it is of another container
        return None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _opened(value: Any) -> Any:
    """Return the value of an argument. Raises WorkerError if the call that it comes from raised."""
    if not isinstance(value, HandedOn):
        return value
    try:
        return ray.get(value.answer)
    except RankError as error:
        raise WorkerError(f"An argument was to come from a call that raised: {error}") from None


_TITLE = RankProcess.__name__.encode()  # Ray puts it into the command line of the process


def kill_rank(pid: int) -> None:
    """End a process of this machine, if it is still an actor."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        if _TITLE in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


# ---------------------------------------------------------------- the driver's side


def open_links(actors: Sequence[Any], nodes: set[str]) -> Links | None:
    """Connect with every actor; return None and log the reason if one cannot be reached.

    Args:
        nodes: ids of the nodes that the actors run on. The driver listens on a port only if an
            actor runs on another node.
    """
    if ray_client.is_connected():
        return _no_links("the driver is a Ray Client, which only Ray reaches")
    try:
        here = ray.get_runtime_context().get_node_id()
        door = Door(len(actors), other_machines=nodes != {here})
    except OSError as error:
        return _no_links(str(error))

    entrance = Entrance(door.folder, ray.util.get_node_ip_address(), door.port, door.token)
    asked = [actor.connect.remote(entrance) for actor in actors]
    peers: Peers = {}
    ends_at = time.monotonic() + _CONNECT_S
    while len(peers) < len(actors) and time.monotonic() < ends_at:
        came = door.admit()
        peers |= came
        if not came and not ray.wait(asked, num_returns=len(asked), timeout=0)[1]:
            break  # all have tried
    door.close()
    remove_scratch(Path(door.folder))

    if len(peers) == len(actors):
        return Links(peers, ByValue)
    for peer in peers.values():
        peer.link.close()
    first = min(set(range(len(actors))) - set(peers))
    return _no_links(f"rank {first} does not reach the driver ({_reason(asked[first])})")


def _reason(asked: Any) -> str:
    try:
        return str(ray.get(asked, timeout=0))
    except RayError as error:  # it is late, or dead, which the next call will report
        return f"{type(error).__name__} after {_CONNECT_S:g} s at most"


def _no_links(reason: str) -> None:
    text = "Calls without rows go through Ray as well, some milliseconds each instead of one"
    say_once(f"{text}: {reason}.", logging.WARNING)
