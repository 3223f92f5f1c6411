"""Ranks as Ray actors: one process each, which holds the workers of all roles of the rank."""

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.client import ray as ray_client
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    PlacementGroupSchedulingStrategy,
)

from verl.single_controller.breadcrumbs import Progress, read_breadcrumbs, read_progress
from verl.single_controller.calls import ANSWER_S, Ends, Lost, Ranks, any_failed
from verl.single_controller.host import OnEmit
from verl.single_controller.links import Links
from verl.single_controller.ray_calls import (
    REFERENCES,
    ROWS,
    Reply,
    answer_of,
    answers_in_time,
    holds,
    on_node,
    shared_call,
)
from verl.single_controller.ray_control import ControlWatch, keep_session
from verl.single_controller.ray_process import (
    HandedOn,
    Place,
    RankProcess,
    kill_rank,
    open_links,
)
from verl.single_controller.shares import Args, Arguments, Kwargs
from verl.utils.errors import WorkerLostError
from verl.utils.garbage import finalize
from verl.utils.launcher import RANKS_OF_GROUP
from verl.utils.logging import logger
from verl.utils.rendezvous import LOOPBACK, loopback_settings
from verl.utils.scratch import hold_scratch, remove_scratch, scratch_path

# Prefixes of the driver's environment variables that workers on every node get.
FORWARDED = ("NCCL_", "TORCH_NCCL_", "PYTORCH_")
_POLL_S = 0.2  # until a rank that raised or died is noticed while others still work
_CHECK_S = 2.0  # between checks of Ray's own processes while a call runs
_LEAVE_S = 20.0  # for a rank to finish its current call, once the driver is done
_START_S = 300.0  # for Ray to start all processes, and for them to import this package
_READ_S = 10.0  # for a task on a node without an answering rank: Ray starts a process for it


Bundle = tuple[PlacementGroup, int]  # room for a process: a placement group, and a number in it


def forwarded() -> dict[str, str]:
    """Return the driver's environment variables that its workers get on every node."""
    return {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}


class RayRanks:
    """The actors of one set of processes, by rank; implements `Ranks`.

    Args:
        bundles: the reserved room of each.
    """

    hands_on_unfinished = True

    def __init__(
        self,
        bundles: Sequence[Bundle],
        *,
        gpus: float,
        cpus: float,
        name_prefix: str,
        detached: bool,
        run_ranks: Sequence[int] | None = None,
    ) -> None:
        name = uuid.uuid4().hex
        self.folder = scratch_path(name)
        if not detached:
            hold_scratch(self.folder)
            # Also for a run that ends without `end`.
            finalize(self, remove_scratch, self.folder)
        self.size = len(bundles)
        self.run_ranks = range(self.size) if run_ranks is None else run_ranks
        self._ended: str | None = None
        self._notes: dict[int, str] = {}
        self._silent: set[int] = set()
        self._silent_nodes: set[str] = set()
        self._unfinished: dict[int, Any] = {}  # rank: ready when its latest call through Ray ends
        self._reasons: dict[int, Lost] = {}  # of deaths that were seen on a connection

        actor_class: Any = ray.remote(  # pyright: ignore
            num_cpus=cpus, num_gpus=gpus, concurrency_groups={"watch": 1}
        )(RankProcess)
        lifetime = {"lifetime": "detached"} if detached else {}
        self.actors: list[Any] = []
        for rank, (group, number) in enumerate(bundles):
            options = actor_class.options(
                name=f"{name_prefix}verl-{name}-{rank}",
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number
                ),
                **lifetime,
            )
            self.actors.append(options.remote(rank, self.size, str(self.folder), detached))

        self.control = None if ray_client.is_connected() else ControlWatch()
        self.places: list[Place] = self._all_started("place", [()] * self.size)
        nodes = {place.node_id for place in self.places}
        self.links = open_links(self.actors, nodes)

        defaults = forwarded()
        if len(nodes) == 1:
            defaults = {**loopback_settings(), **defaults}
        # This also covers a Ray that was initialized elsewhere. Variables that a node or a
        # runtime_env sets are kept.
        environments = _environments(self.places)
        if list(self.run_ranks) != list(range(self.size)):
            for environment in environments:
                environment[RANKS_OF_GROUP] = ",".join(map(str, self.run_ranks))
        self._all_started(
            "set_environment", [(environment, defaults) for environment in environments]
        )

    def _all_started(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        references = []
        for actor, args in zip(self.actors, arguments):
            references.append(getattr(actor, method).remote(*args))
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
        on_emit: OnEmit = None,
    ) -> dict[int, Any]:
        if self._ended is not None:
            raise WorkerLostError(f"{role}.{method} cannot be called any more: {self._ended}")
        self._check_control()
        links = self._links_for(arguments) if blocking else None
        if links is not None:
            return links.call(role, method, arguments, on_emit)

        is_heard = on_emit is not None
        calls: dict[int, Any] = {}
        for share in arguments.values():
            calls[id(share)] = (role, method, *share, is_heard)
        if len(calls) < len(arguments):
            calls = {key: shared_call(call) for key, call in calls.items()}

        replies: dict[int, Any] = {}
        for rank, share in arguments.items():
            reply = Reply(self.actors[rank], calls[id(share)], on_emit)
            replies[rank] = reply
            self._unfinished[rank] = reply.ended
        return replies

    def start_on(self, rank: int, role: str, method: str, args: Args, kwargs: Kwargs) -> Any:
        """Start a method on one rank; return the reference of its answer, for `ray.get`."""
        reply = Reply(self.actors[rank], (role, method, args, kwargs, False), None)
        self._unfinished[rank] = reply.ended
        return reply.reference

    def _links_for(self, arguments: Mapping[int, Arguments]) -> Links | None:
        """Return the ranks' own connections, or None if the call must go through Ray.

        A call over the connections takes a third of Ray's time. Ray is better for rows, which it
        stores once for all receivers. A call must not overtake one that is still in Ray's queue. If
        a connection is lost, Ray knows the reason.
        """
        if self.links is None or self.links.lost:
            return None
        different = {id(share): share for share in arguments.values()}
        for args, kwargs in different.values():
            if holds(ROWS + REFERENCES, args, kwargs):
                return None

        before = [self._unfinished[rank] for rank in arguments.keys() & self._unfinished.keys()]
        if before:
            _, queued = ray.wait(before, num_returns=len(before), timeout=0, fetch_local=False)
            if queued:
                return None
        for rank in arguments:
            self._unfinished.pop(rank, None)
        return self.links

    def wait(self, replies: Mapping[int, Any], timeout_s: float) -> Ends:
        ends_at = time.monotonic() + timeout_s
        if self.links is not None and any(isinstance(reply, Future) for reply in replies.values()):
            return self._explained(self._wait_for_links(self.links, replies, ends_at))

        waiting = dict(replies)
        ended = self._all_at_once(waiting, timeout_s)
        while waiting and not any_failed(ended):
            self._check_control()
            for reply in waiting.values():
                reply.hear()

            left = ends_at - time.monotonic()
            timeout = min(max(left, 0.0), _POLL_S)
            ranks: dict[Any, int] = {}
            for rank, reply in waiting.items():
                ranks[reply.reference] = rank
            done, _ = ray.wait(list(ranks), num_returns=len(ranks), timeout=timeout)
            for reference in done:
                rank = ranks[reference]
                ended[rank] = waiting.pop(rank).take(answer_of(reference))
            if left <= 0:
                break
        return ended

    def _wait_for_links(self, links: Links, replies: Mapping[int, Future], ends_at: float) -> Ends:
        while True:
            left = ends_at - time.monotonic()
            ended = links.wait(replies, min(left, _CHECK_S))
            if any_failed(ended) or len(ended) == len(replies) or left <= _CHECK_S:
                return ended
            self._check_control()

    def _check_control(self) -> None:
        """Raise WorkerLostError if Ray's control service is gone.

        First ends all processes that can be ended without it.
        """
        if self.control is None or self.control.reason is None:
            return
        self._ended = self.control.reason
        for place in self.places:
            if place.node_id == ray.get_runtime_context().get_node_id():
                kill_rank(place.pid)
        self.control.check()

    def _all_at_once(self, waiting: dict[int, Reply], timeout_s: float) -> Ends:
        """Return how the calls ended, or nothing unless all end soon and no actor dies.

        This takes one request to Ray instead of three.
        """
        references = [reply.reference for reply in waiting.values()]
        try:
            answers = ray.get(references, timeout=min(timeout_s, _POLL_S))
        except (GetTimeoutError, RayError):
            return {}

        ended = {}
        for rank, answer in zip(list(waiting), answers):
            ended[rank] = waiting.pop(rank).take(answer)
        return ended

    def _explained(self, ended: Ends) -> Ends:
        """Add Ray's reason to each lost rank.

        A connection reports the loss first, but Ray knows the reason.
        """
        lost = {rank: end for rank, end in ended.items() if isinstance(end, Lost)}
        asked = {}
        for rank in lost.keys() - self._reasons.keys():
            asked[rank] = self.actors[rank].place.remote()

        done = []
        if asked:
            done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S)
        for rank, reference in asked.items():
            answer = answer_of(reference) if reference in done else None
            if isinstance(answer, Lost):
                self._reasons[rank] = answer
            else:  # the actor is alive
                reason = f"its connection with the driver broke: {lost[rank].reason}"
                self._reasons[rank] = Lost(reason)
        return ended | {rank: self._reasons[rank] for rank in lost}

    def values(self, replies: Sequence[Any]) -> list[Any]:
        values = []
        for reply in replies:
            values.append(reply.result()() if isinstance(reply, Future) else reply.value)
        return values

    def hand_on(self, replies: Sequence[Reply], receiver: Ranks) -> list[HandedOn] | None:
        """Return references to answers; the receiving rank waits for those that are to come."""
        if not isinstance(receiver, RayRanks):
            return None
        return [HandedOn(reply.reference) for reply in replies]

    def describe(self, rank: int) -> str:
        place = self.places[rank]
        text = f"{place.machine}, {place.address}, pid {place.pid}"
        of_run = self.run_ranks[rank]
        return text if of_run == rank else f"rank {of_run} of the run, {text}"

    def stacks(self, timeout_s: float) -> dict[int, str]:
        asked = {rank: actor.whereabouts.remote() for rank, actor in enumerate(self.actors)}
        answers = answers_in_time(asked, timeout_s)
        self._silent = asked.keys() - answers.keys()
        self._notes = {}
        for _, notes in answers.values():
            # Notes of all ranks of that machine, also of those that do not answer.
            self._notes |= notes
        return {rank: stacks for rank, (stacks, _) in answers.items()}

    def breadcrumbs(self) -> dict[int, str]:
        nodes: set[str] = set()
        for rank, place in enumerate(self.places):
            if rank not in self._notes:
                nodes.add(place.node_id)
        if nodes:
            first = min(self._silent, default=0)
            logger.warning(
                "Rank %d (%s) does not answer, and no other rank of its machine does. Ray has "
                "%g s to read its last breadcrumb.",
                *(first, self.describe(first), _READ_S),
            )
        asked = {node: on_node(node, read_breadcrumbs, self.folder) for node in nodes}
        answers = answers_in_time(asked, _READ_S)
        self._silent_nodes = nodes - answers.keys()
        for notes in answers.values():
            self._notes |= notes

        unread = "cannot be read, its machine does not answer"
        self._notes = {rank: self._notes.get(rank, unread) for rank in range(self.size)}
        return self._notes

    def progress(self) -> list[Progress]:
        return read_progress(self.folder)

    def abort(self, reason: str) -> None:
        self._ended = reason
        keep_session()
        self._stop_watching()
        self._kill(set(self._silent))
        for actor in self.actors:
            ray.kill(actor)

    def _kill(self, stopped: set[int]) -> None:
        """End processes that do not react to Ray.

        A process on their machine must send the signal. A neighbor does so. If it does not in time,
        a task, for which Ray starts a process, ends the rank and the neighbor.
        """
        neighbors = {}
        asked = {}
        for rank in stopped:
            neighbor = self._neighbor(rank)
            if neighbor is not None:
                neighbors[rank] = neighbor
                pid = self.places[rank].pid
                asked[rank] = self.actors[neighbor].kill_neighbor.remote(pid)
        killed = answers_in_time(asked, ANSWER_S).keys()

        left = stopped - killed
        for rank in neighbors.keys() - killed:
            left.add(neighbors[rank])

        waited = {}
        for rank in left:
            place = self.places[rank]
            task = on_node(place.node_id, kill_rank, place.pid)
            # A machine that has just been silent for so long gets its task, and no further wait.
            if place.node_id not in self._silent_nodes:
                waited[rank] = task
        for rank in sorted(left - answers_in_time(waited, _READ_S).keys()):
            logger.warning(
                "Rank %d (%s) could not be ended: nothing on its machine did so within %g s. If it "
                "still runs, it keeps its memory: kill -9 %d there.",
                *(rank, self.describe(rank), _READ_S, self.places[rank].pid),
            )

    def _stop_watching(self) -> None:
        if self.control is not None:
            self.control.close()

    def _neighbor(self, rank: int) -> int | None:
        """Return another rank of its machine that answered a moment ago."""
        node = self.places[rank].node_id
        for other, place in enumerate(self.places):
            if place.node_id == node and other != rank and other not in self._silent:
                return other
        return None

    def end(self) -> None:
        """Let every rank finish its calls, then end; kill those that do not end."""
        if self._ended is None:
            self._ended = "the pool was shut down."
            self._stop_watching()
            for actor in self.actors:
                actor.finish.remote()
            leaving: dict[Any, int] = {}
            for rank, actor in enumerate(self.actors):
                leaving[actor.__ray_terminate__.remote()] = rank
            _, late = ray.wait(list(leaving), num_returns=len(leaving), timeout=_LEAVE_S)
            if late:
                self._silent = {leaving[reference] for reference in late}
                self.abort(self._ended)
        remove_scratch(self.folder)


def _environments(places: Sequence[Place]) -> list[dict[str, str]]:
    """Return the variables of each rank that torchrun would set."""
    ranks_on_node: dict[str, int] = {}
    environments = []
    for place in places:
        local_rank = ranks_on_node.get(place.node_id, 0)
        ranks_on_node[place.node_id] = local_rank + 1
        number = str(local_rank)
        environments.append({"LOCAL_RANK": number, "RAY_LOCAL_RANK": number})

    for environment, place in zip(environments, places):
        environment["LOCAL_WORLD_SIZE"] = str(ranks_on_node[place.node_id])
        environment["RAY_LOCAL_WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"]
        environment["MASTER_ADDR"] = places[0].address if len(ranks_on_node) > 1 else LOOPBACK
        environment["MASTER_PORT"] = str(places[0].free_port)
    return environments
