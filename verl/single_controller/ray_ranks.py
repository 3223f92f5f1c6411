"""Ranks that are Ray actors: one process each, in which the workers of all roles of the rank
live."""

import os
import shutil
import tempfile
import time
import types
import uuid
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.client import ray as ray_client
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from verl.protocol import DataProto
from verl.single_controller.breadcrumbs import Progress, read_breadcrumbs, read_progress
from verl.single_controller.calls import ANSWER_S, Lost, Ranks
from verl.single_controller.data_future import DataProtoFuture
from verl.single_controller.dispatch import Arguments
from verl.single_controller.host import OnTold, Raised
from verl.single_controller.links import Links
from verl.single_controller.ray_control import ControlWatch
from verl.single_controller.ray_process import (
    Call,
    HandedOn,
    Place,
    RankProcess,
    kill_rank,
    open_links,
)
from verl.utils.errors import WorkerLostError
from verl.utils.logging import logger
from verl.utils.rendezvous import LOOPBACK, loopback_settings

# Beginnings of variables that workers on every node get from the driver.
FORWARDED = ("NCCL_", "TORCH_NCCL_", "PYTORCH_")
_POLL_S = 0.2  # in which a rank that raised or died is noticed while others still work
_CHECK_S = 2.0  # between looks at Ray's own processes while a call goes on
_LEAVE_S = 20.0  # for a rank to finish what it is at, once the driver is done
_START_S = 300.0  # for Ray to start all processes, and for them to import this package
_READ_S = 10.0  # for a task on a node none of whose ranks answers: Ray starts a process for it


Key = TypeVar("Key", int, str)


class Reply:
    """To a call of an actor, which may still be running."""

    def __init__(self, actor: Any, call: Any, on_told: OnTold) -> None:
        self.actor, self.on_told, self.value = actor, on_told, None
        self.reference, self.ended = actor.run.remote(call)
        self._asked: Any = None

    def take(self, answer: Any) -> Raised | Lost | None:
        """Keep what the call gave; gives how it ended."""
        if isinstance(answer, Raised | Lost):
            return answer
        self.value = answer
        return None

    def hear(self) -> None:
        """Take what has been told since the last time, if that has come, and ask for more."""
        if self.on_told is None or (
            self._asked is not None and not ray.wait([self._asked], timeout=0)[0]
        ):
            return
        answer = [] if self._asked is None else _answer(self._asked)
        # else it is lost, which `wait` will tell
        for value in answer if isinstance(answer, list) else ():
            self.on_told(value)
        self._asked = self.actor.take_told.remote()


def forwarded() -> dict[str, str]:
    """The driver's variables that its workers get on every node."""
    return {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}


class RayRanks:
    """The actors of one set of processes, by rank; implements `Ranks`."""

    hands_on_unfinished = True

    def __init__(
        self,
        groups: Sequence[PlacementGroup],
        *,
        gpus: float,
        cpus: float,
        name_prefix: str,
        detached: bool,
    ) -> None:
        self.folder = Path(tempfile.gettempdir()) / f"verl-{uuid.uuid4().hex}"
        if not detached:
            # also of a run that ends by itself
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        bundles = [(group, number) for group in groups for number in range(group.bundle_count)]
        self.size = len(bundles)
        self._ended: str | None = None
        self._notes: dict[int, str] = {}
        self._silent: set[int] = set()
        # rank: arrives at the end of its latest call through Ray
        self._unfinished: dict[int, Any] = {}
        self._reasons: dict[int, Lost] = {}  # of deaths that a connection has told
        make: Any = ray.remote(num_cpus=cpus, num_gpus=gpus, concurrency_groups={"watch": 1})  # pyright: ignore
        lifetime = {"lifetime": "detached"} if detached else {}
        self.actors: list[Any] = [
            make(RankProcess)
            .options(
                name=f"{name_prefix}{self.folder.name}-{rank}",
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number
                ),
                **lifetime,
            )
            .remote(rank, self.size, str(self.folder))
            for rank, (group, number) in enumerate(bundles)
        ]
        self.control = None if ray_client.is_connected() else ControlWatch()
        self.places: list[Place] = self._all_started("place", [()] * self.size)
        on_node: dict[str, int] = {}
        environments = []
        for place in self.places:
            local_rank = on_node.setdefault(place.node_id, 0)
            on_node[place.node_id] += 1
            number = str(local_rank)
            environments.append({"LOCAL_RANK": number, "RAY_LOCAL_RANK": number})
        for environment, place in zip(environments, self.places):
            environment["LOCAL_WORLD_SIZE"] = str(on_node[place.node_id])
            environment["RAY_LOCAL_WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"]
            environment["MASTER_ADDR"] = self.places[0].address if len(on_node) > 1 else LOOPBACK
            environment["MASTER_PORT"] = str(self.places[0].free_port)
        self.links = open_links(self.actors, nodes=set(on_node))
        defaults = forwarded()
        if len(on_node) == 1:
            defaults = {**loopback_settings(), **defaults}
        # Also for a Ray that somebody else has initialised; what a node or a runtime_env sets is
        # not touched.
        self._all_started(
            "set_environment", [(environment, defaults) for environment in environments]
        )

    def _all_started(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        references = [
            getattr(actor, method).remote(*args) for actor, args in zip(self.actors, arguments)
        ]
        try:
            return ray.get(references, timeout=_START_S)
        except RayError as error:
            self.abort("its processes did not start.")
            raise WorkerLostError(
                f"{self.size} processes of Ray did not start within {_START_S:g} s, or died: "
                f"{error}"
            ) from error

    # ---------------------------------------------------------------- the calls of `Ranks`

    def submit(
        self,
        role: str,
        method: str,
        arguments: Mapping[int, Arguments],
        blocking: bool = True,
        on_told: OnTold = None,
    ) -> dict[int, Any]:
        if self._ended is not None:
            raise WorkerLostError(f"{role}.{method} cannot be called any more: {self._ended}")
        self._check_control()
        links = self._links_for(arguments) if blocking else None
        if links is not None:
            return links.call(role, method, arguments, on_told)
        calls: dict[int, Any] = {
            id(share): (role, method, *share, on_told is not None) for share in arguments.values()
        }
        if len(calls) < len(arguments):
            calls = {key: _shared(call) for key, call in calls.items()}
        replies = {
            rank: Reply(self.actors[rank], calls[id(share)], on_told)
            for rank, share in arguments.items()
        }
        self._unfinished |= {rank: reply.ended for rank, reply in replies.items()}
        return replies

    def _links_for(self, arguments: Mapping[int, Arguments]) -> Links | None:
        """The ranks' own connections, where a call may go by them, which takes a third of Ray's
        time.

        Rows are stored by Ray once for all who take them. A call must not overtake one that is
        still with Ray. Where a connection is lost, Ray knows why.
        """
        if self.links is None or self.links.lost:
            return None
        shares = {id(share): share for share in arguments.values()}.values()
        if any(_holds(_ROWS + _REFERENCES, args, kwargs) for args, kwargs in shares):
            return None
        before = [self._unfinished[rank] for rank in arguments.keys() & self._unfinished.keys()]
        if before and ray.wait(before, num_returns=len(before), timeout=0, fetch_local=False)[1]:
            return None
        for rank in arguments:
            self._unfinished.pop(rank, None)
        return self.links

    def wait(self, replies: Mapping[int, Any], timeout_s: float) -> dict[int, Raised | Lost | None]:
        ends_at = time.monotonic() + timeout_s
        if self.links is not None and any(isinstance(reply, Future) for reply in replies.values()):
            return self._explained(self._wait_for_links(self.links, replies, ends_at))
        waiting = dict(replies)
        ended = self._all_at_once(waiting, timeout_s)
        while waiting and not any(end is not None for end in ended.values()):
            self._check_control()
            for reply in waiting.values():
                reply.hear()
            left = ends_at - time.monotonic()
            of = {reply.reference: rank for rank, reply in waiting.items()}
            done, _ = ray.wait(list(of), num_returns=len(of), timeout=min(max(left, 0.0), _POLL_S))
            for reference in done:
                rank = of[reference]
                ended[rank] = waiting.pop(rank).take(_answer(reference))
            if left <= 0:
                break
        return ended

    def _wait_for_links(
        self, links: Links, replies: Mapping[int, Future], ends_at: float
    ) -> dict[int, Raised | Lost | None]:
        while True:
            left = ends_at - time.monotonic()
            ended = links.wait(replies, min(left, _CHECK_S))
            badly = any(end is not None for end in ended.values())
            if badly or len(ended) == len(replies) or left <= _CHECK_S:
                return ended
            self._check_control()

    def _check_control(self) -> None:
        """Raise WorkerLostError where Ray's control service is gone, after ending all processes
        that can be ended without it."""
        if self.control is None or self.control.reason is None:
            return
        self._ended = self.control.reason
        for place in self.places:
            if place.node_id == ray.get_runtime_context().get_node_id():
                kill_rank(place.pid)
        self.control.check()

    def _all_at_once(
        self, waiting: dict[int, Reply], timeout_s: float
    ) -> dict[int, Raised | Lost | None]:
        """How calls ended where all do soon and no actor dies: one request to Ray instead of
        three."""
        try:
            answers = ray.get(
                [reply.reference for reply in waiting.values()], timeout=min(timeout_s, _POLL_S)
            )
        except (GetTimeoutError, RayError):
            return {}
        return {
            rank: waiting.pop(rank).take(answer) for rank, answer in zip(list(waiting), answers)
        }

    def _explained(self, ended: dict[int, Raised | Lost | None]) -> dict[int, Raised | Lost | None]:
        """A connection tells that a rank is lost, and at once; Ray tells why."""
        lost = {rank: end for rank, end in ended.items() if isinstance(end, Lost)}
        asked = {
            rank: self.actors[rank].place.remote() for rank in lost.keys() - self._reasons.keys()
        }
        done = (
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)[0]
            if asked
            else []
        )
        for rank, reference in asked.items():
            told = _answer(reference) if reference in done else None
            alive = Lost(f"its connection with the driver broke: {lost[rank].reason}")
            self._reasons[rank] = told if isinstance(told, Lost) else alive
        return ended | {rank: self._reasons[rank] for rank in lost}

    def values(self, replies: Sequence[Any]) -> list[Any]:
        return [reply.result()() if isinstance(reply, Future) else reply.value for reply in replies]

    def hand_on(self, replies: Sequence[Reply], receiver: Ranks) -> list[HandedOn] | None:
        """References, also of answers that are not there yet: the receiving rank waits for them."""
        return (
            [HandedOn(reply.reference) for reply in replies]
            if isinstance(receiver, RayRanks)
            else None
        )

    def describe(self, rank: int) -> str:
        place = self.places[rank]
        return f"{place.machine}, {place.address}, pid {place.pid}"

    def stacks(self, timeout_s: float) -> dict[int, str]:
        asked = {rank: actor.whereabouts.remote() for rank, actor in enumerate(self.actors)}
        answers = _answered(asked, timeout_s)
        self._silent = asked.keys() - answers.keys()
        self._notes = {}
        for _, notes in answers.values():
            self._notes |= notes  # of all ranks of that machine, also of those that do not answer
        return {rank: stacks for rank, (stacks, _) in answers.items()}

    def breadcrumbs(self) -> dict[int, str]:
        nodes = {place.node_id for rank, place in enumerate(self.places) if rank not in self._notes}
        for notes in _answered(
            {node: _on_node(node, read_breadcrumbs, self.folder) for node in nodes}, _READ_S
        ).values():
            self._notes |= notes
        unread = "cannot be read, its machine does not answer"
        self._notes = {rank: self._notes.get(rank, unread) for rank in range(self.size)}
        return self._notes

    def progress(self) -> list[Progress]:
        return read_progress(self.folder)

    def abort(self, reason: str) -> None:
        self._ended = reason
        self._stop_watching()
        self._kill(set(self._silent))
        for actor in self.actors:
            ray.kill(actor)

    def _kill(self, stopped: set[int]) -> None:
        """End processes that do not hear what Ray tells them: somebody on their machine must send
        the signal. A task, for which Ray starts a process, does what a neighbour has not done in
        time, and ends the neighbour as well."""
        others = {rank: other for rank in stopped if (other := self._neighbour(rank)) is not None}
        asked = {
            rank: self.actors[other].kill_neighbour.remote(self.places[rank].pid)
            for rank, other in others.items()
        }
        killed = _answered(asked, ANSWER_S).keys()
        left = stopped - killed | {others[rank] for rank in asked.keys() - killed}
        asked = {
            rank: _on_node(self.places[rank].node_id, kill_rank, self.places[rank].pid)
            for rank in left
        }
        for rank in sorted(left - _answered(asked, _READ_S).keys()):
            logger.warning(
                "Rank %d (%s) could not be ended: nothing on its machine did so within %g s. If it "
                "still runs, it keeps its memory: kill -9 %d there.",
                *(rank, self.describe(rank), _READ_S, self.places[rank].pid),
            )

    def _stop_watching(self) -> None:
        if self.control is not None:
            self.control.close()

    def _neighbour(self, rank: int) -> int | None:
        """Another rank of its machine, which answered a moment ago."""
        node = self.places[rank].node_id
        others = (other for other, place in enumerate(self.places) if place.node_id == node)
        return next(
            (other for other in others if other != rank and other not in self._silent), None
        )

    def end(self) -> None:
        """Let every rank finish what it was asked, then end; those that do not are killed."""
        if self._ended is None:
            self._ended = "the pool was shut down."
            self._stop_watching()
            for actor in self.actors:
                actor.finish.remote()
            leaving = {
                actor.__ray_terminate__.remote(): rank for rank, actor in enumerate(self.actors)
            }
            _, late = ray.wait(list(leaving), num_returns=len(leaving), timeout=_LEAVE_S)
            if late:
                self._silent = {leaving[reference] for reference in late}
                self.abort(self._ended)
        shutil.rmtree(self.folder, ignore_errors=True)


def _on_node(node: str, function: types.FunctionType, *args: Any) -> Any:
    """The reference of what a function gives on a node."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    # As code: a process that looked the function up by name would import torch first, which takes
    # seconds.
    by_value = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    by_value.__module__ = "__main__"
    task: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)  # pyright: ignore
    return task(by_value).remote(*args)


def _answered(asked: Mapping[Key, Any], timeout_s: float) -> dict[Key, Any]:
    """What came in time, and came well."""
    of = {reference: key for key, reference in asked.items()}
    done = ray.wait(list(of), num_returns=len(of), timeout=timeout_s)[0] if of else []
    answers = {of[reference]: _answer(reference) for reference in done}
    return {key: answer for key, answer in answers.items() if not isinstance(answer, Raised | Lost)}


def _answer(reference: Any) -> Any:
    """What a reference holds that is there, or why it holds nothing."""
    try:
        return ray.get(reference)
    except RayTaskError as error:  # an argument or the answer could not be pickled
        return Raised(str(error.cause), str(error), None)
    except RayError as error:
        # Ray's guesses are a page long
        return Lost(" ".join(str(error).split("Some common causes")[0].split()))


def _shared(call: Call) -> Any:
    """A call that several ranks get. Its rows are stored once; without any it is pickled once, for
    Ray would do so for every rank, an eighth of the time of a small call. References must be
    pickled by Ray, which counts them."""
    _, _, args, kwargs, _ = call
    if _holds(_ROWS, args, kwargs):
        return ray.put(call)
    return call if _holds(_REFERENCES, args, kwargs) else cloudpickle.dumps(call)


_ROWS = (DataProto,)
_REFERENCES = (HandedOn, DataProtoFuture, ray.ObjectRef)


def _holds(kinds: tuple[type, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, kinds) for value in (*args, *kwargs.values()))
