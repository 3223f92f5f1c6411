"""Backend `spmd`: this process alone, or all ranks that torchrun started, driven by rank 0.

On the driver, `join()` returns the pool. On every other rank it serves the driver's calls and never
returns.
"""

import atexit
import functools
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from verl.single_controller.breadcrumbs import (
    Progress,
    format_stacks,
    keep_breadcrumbs,
    read_breadcrumbs,
    read_progress,
)
from verl.single_controller.calls import ANSWER_S, WHY_DEAD, Ends, Lost, Ranks, describe_deaths
from verl.single_controller.host import Host, OnEmit, found_here
from verl.single_controller.in_process import Background
from verl.single_controller.links import Links, Peers
from verl.single_controller.parts import split_launch
from verl.single_controller.rank_thread import RankThread
from verl.single_controller.shares import Arguments, each_argument
from verl.single_controller.spmd_rank import connect_all, serve
from verl.single_controller.wire import Incoming, Kind, Outgoing
from verl.single_controller.worker import Worker
from verl.single_controller.worker_group import DEADLINE_S, WorkerGroup, start_role
from verl.utils.errors import WorkerLostError
from verl.utils.launcher import end_with_launcher, launched_rank
from verl.utils.logging import logger
from verl.utils.scratch import remove_scratch
from verl.utils.sigterm import (
    TERMINATED,
    handle_sigterm,
    in_main_thread,
    interrupts_wait,
    raise_swallowed,
)

_LEAVE_S = 20.0  # for a rank to finish its current call, once the driver is done
_NEWS_S = 2.0  # after torchrun's SIGTERM, until this process knows of the death that caused it


class ResourcePool(Protocol):
    """Processes that run workers. Roles that are started in one pool share its processes."""

    world_size: int

    def start(
        self,
        role: str,
        worker_class: type[Worker],
        *args: Any,
        deadline_s: float = DEADLINE_S,
        **kwargs: Any,
    ) -> WorkerGroup:
        """Build `worker_class(*args, **kwargs)` on every rank at once; return their group."""
        ...

    def shutdown(self) -> None:
        """End the processes, once they are done with their calls."""
        ...


class LocalPool:
    """This process alone: a call on a group is a call."""

    world_size = 1

    def __init__(self) -> None:
        self._background = Background()
        self._workers: dict[str, Worker] = {}

    def start(
        self,
        role: str,
        worker_class: type[Worker],
        *args: Any,
        deadline_s: float = DEADLINE_S,
        **kwargs: Any,
    ) -> WorkerGroup:
        worker = worker_class(*args, **found_here(kwargs, self._workers))
        self._workers[role] = worker
        return WorkerGroup(worker, role, self._background)

    def split(self, parts: Sequence[Sequence[int]]) -> "list[LocalPool]":
        """Return this pool, which has one part at most."""
        assert [*map(list, parts)] == [[0]], parts
        return [self]

    def shutdown(self) -> None:
        """Close the workers and let go of them: this process continues."""
        self._background.finish()
        workers = list(self._workers.values())
        self._workers.clear()
        for worker in workers:
            worker.close()


def join(connect_timeout_s: float = 300.0, silence_s: float = 300.0) -> "LocalPool | SpmdPool":
    """Return the pool of all processes that were launched together, on the driver (RANK 0).

    On every other rank this call serves until the driver has finished, and then ends the process
    (SystemExit). Raises ConfigError if torchrun's variables are incomplete, and WorkerLostError if
    ranks do not connect.

    Args:
        silence_s: the other ranks end a driver that gives no sign of life for this long, such as a
            stopped process.
    """
    rank, world_size = launched_rank()
    if world_size == 1:
        return LocalPool()
    end_with_launcher()
    raise_swallowed()
    if rank > 0:
        serve(rank, world_size, connect_timeout_s, silence_s)
        raise SystemExit(0)
    ranks = SpmdRanks(*connect_all(world_size, connect_timeout_s))
    return SpmdPool(ranks, EndOfLaunch(ranks), range(world_size))


class SpmdPool:
    """All ranks of a launch, or a part of them. The launch ends with `shutdown`."""

    def __init__(self, ranks: "SpmdRanks", end: "EndOfLaunch", members: Sequence[int]) -> None:
        self.ranks = ranks
        self.members = list(members)
        self.world_size = len(members)
        self._end = end

    def start(
        self,
        role: str,
        worker_class: type[Worker],
        *args: Any,
        deadline_s: float = DEADLINE_S,
        **kwargs: Any,
    ) -> WorkerGroup:
        """Build `worker_class(*args, **kwargs)` on every rank at once; return their group."""
        group = start_role(self.ranks, role, worker_class, args, kwargs, deadline_s, self.members)
        self._end.come_first()
        return group

    def split(self, parts: Sequence[Sequence[int]]) -> "list[SpmdPool]":
        """Return pools of disjoint parts of the ranks, each a world of its own.

        Call this before anything is started here.
        """
        if len(parts) == 1 and list(parts[0]) == self.members:
            return [self]
        split_launch(self.ranks, parts)
        return [SpmdPool(self.ranks, self._end, part) for part in parts]

    def shutdown(self) -> None:
        """End the other ranks, once they are done with their calls; kill those that do not end."""
        self.ranks.end()


class EndOfLaunch:
    """Ends the other ranks before this process does."""

    def __init__(self, ranks: "SpmdRanks") -> None:
        self.ranks = ranks
        self._pid = os.getpid()
        self.come_first()
        if in_main_thread():
            handle_sigterm(self._on_sigterm)

    def come_first(self) -> None:
        """Move `_at_exit` to the front of the exit handlers, after others have been added.

        All ranks of a process group must end it together, so the other ranks must leave before this
        process does.
        """
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:  # a child that was forked and inherited the handler
            return
        self.ranks.end()
        # A thread in a collective that no other rank will reach would block the other exit
        # handlers.
        if not self.ranks.local.idle.wait(ANSWER_S if self.ranks.is_whole() else 0.0):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _on_sigterm(self, signum: int, frame: types.FrameType | None) -> None:
        """Report a lost rank before this one ends: torchrun ends all ranks when one dies."""
        if self.ranks.failing.is_set():
            return
        if self.ranks.links.news.wait(_NEWS_S):
            if self.ranks.waiting:
                return  # the error of the call will say more
            self.ranks.raise_lost()
        raise SystemExit(TERMINATED)


class SpmdRanks:
    """Rank 0 is a thread of this process, the others are peers; implements `Ranks`."""

    hands_on_unfinished = False

    def __init__(self, peers: Peers, folder: Path) -> None:
        self.size = len(peers) + 1
        self.folder = folder
        self.failing = threading.Event()
        self.waiting = False
        self._ended: str | None = None
        self._notes: dict[int, str] = {}
        self._silent: set[int] = set()
        keep_breadcrumbs(folder, 0)
        self.host = Host()
        self.local = RankThread("rank 0")
        self.links = Links(peers)
        self.peers = peers
        self.lost = self.links.lost

    # ---------------------------------------------------------------- the calls of `Ranks`

    def submit(
        self,
        role: str,
        method: str,
        arguments: Mapping[int, Arguments],
        blocking: bool = True,
        on_emit: OnEmit = None,
    ) -> dict[int, Future]:
        if self._ended is not None:
            raise WorkerLostError(f"{role}.{method} cannot be called any more: {self._ended}")
        others = {rank: share for rank, share in arguments.items() if rank > 0}
        # Ranks of a call that the others do not get would wait for them in a collective.
        with interrupts_wait():
            replies = self.links.call(role, method, others, on_emit)
            if 0 in arguments:
                args, kwargs = each_argument(_opened, *arguments[0])
                replies[0] = self.local.submit(
                    functools.partial(self.host.run, role, method, args, kwargs, on_emit)
                )
        return dict(sorted(replies.items()))

    def wait(self, replies: Mapping[int, Future], timeout_s: float) -> Ends:
        with self._error_to_come():
            return self.links.wait(replies, timeout_s)

    @contextmanager
    def _error_to_come(self) -> Iterator[None]:
        """Leave it to the call that the driver waits for to report a rank that dies meanwhile."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False

    def values(self, replies: Sequence[Future]) -> list[Any]:
        return [reply.result()() for reply in replies]

    def hand_on(self, replies: Sequence[Future], receiver: Ranks) -> list[Any] | None:
        """Return the messages of other ranks, to be forwarded as they are, and rank 0's value."""
        if receiver is not self:
            return None

        values: list[Any] = []
        for reply in replies:
            answer = reply.result()
            if isinstance(answer, types.MethodType):  # `value` of an Incoming
                values.append(answer.__self__)
            else:
                values.append(answer())
        return values

    def describe(self, rank: int) -> str:
        if rank in self.peers:
            return self.peers[rank].place
        return f"{socket.gethostname()}, pid {os.getpid()}, driver"

    def stacks(self, timeout_s: float) -> dict[int, str]:
        if self.lost:
            self.failing.set()
        self._notes = {}
        asked: dict[int, Future] = {}
        for rank in self.peers:
            asked[rank] = self.links.send(rank, Kind.ASK_STACKS, Outgoing(None))
        with self._error_to_come():
            wait(asked.values(), timeout_s)

        stacks = {0: format_stacks()}
        for rank, future in asked.items():
            if future.done() and not isinstance(future.result(), Lost):
                ((stacks[rank], notes),) = self.values([future])
                # Notes of all ranks of that machine, also of those that do not answer.
                self._notes |= notes
        self._silent = set(self.peers) - set(stacks)
        return stacks

    def breadcrumbs(self) -> dict[int, str]:
        return {**self._notes, **read_breadcrumbs(self.folder)}

    def progress(self) -> list[Progress]:
        return read_progress(self.folder)

    def abort(self, reason: str) -> None:
        self._ended = reason
        self.failing.set()
        for rank, peer in self.peers.items():
            if rank not in self.lost:
                self.links.send(rank, Kind.ABORT, Outgoing(None))
                peer.leaving = True
        # A rank that did not answer will not read this either.
        self._wait_until_gone(ANSWER_S, self._silent)

    # ---------------------------------------------------------------- the end

    def end(self) -> None:
        """Ask every rank to leave, and kill those of this machine that do not in time."""
        if self._ended is None:
            self._ended = "the pool was shut down."
            leaving: list[Future] = []
            for rank in self.peers:
                if rank not in self.lost:
                    leaving.append(self.links.send(rank, Kind.END, Outgoing(None)))
            for peer in self.peers.values():
                peer.leaving = True
            if wait(leaving, _LEAVE_S).not_done:
                self._wait_until_gone(0.0, set())
        remove_scratch(self.folder)

    def is_whole(self) -> bool:
        """Return whether no rank was lost or given up."""
        return not self.failing.is_set() and not self.links.news.is_set()

    def raise_lost(self) -> None:
        """Raise the error of ranks that died while the driver was not waiting for them."""
        lines = [*describe_deaths(self, self.lost), WHY_DEAD]
        self.stacks(ANSWER_S)
        notes = self.breadcrumbs()
        for rank in self.lost:
            lines.append(f"Last breadcrumb of rank {rank}: {notes.get(rank, 'none')}")

        self.abort(lines[0])
        raise WorkerLostError("\n".join(lines))

    def _wait_until_gone(self, timeout_s: float, hopeless: set[int]) -> None:
        ends_at = time.monotonic() + timeout_s
        while time.monotonic() < ends_at and set(self.peers) - hopeless - set(self.lost):
            time.sleep(0.01)
        for rank, peer in self.peers.items():
            if rank not in self.lost and peer.on_this_machine:
                logger.warning(
                    "Rank %d (%s) does not end by itself and is killed.", rank, peer.place
                )
                os.kill(peer.pid, signal.SIGKILL)


def _opened(value: Any) -> Any:
    return value.value() if isinstance(value, Incoming) else value
