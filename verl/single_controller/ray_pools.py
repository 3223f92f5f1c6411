"""Pools: reserved room on a Ray cluster, for one process per GPU or CPU; their parts and unions."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from verl.single_controller.ray_control import is_own
from verl.single_controller.ray_groups import RayWorkerGroup
from verl.single_controller.ray_ranks import Bundle, RayRanks
from verl.single_controller.worker import Worker
from verl.single_controller.worker_group import DEADLINE_S, WorkerGroup, start_role
from verl.utils.errors import ConfigError
from verl.utils.logging import logger

_OWN_ROOM_S = 30.0  # wait for room in the run's own Ray, where only the run itself can free some
_SILENT_S = 3.0  # of waiting for room


class RayResourcePool:
    """Reserved room on a Ray cluster, for one process per GPU or CPU; implements `ResourcePool`.

    Args:
        process_on_nodes: number of processes of each node, such as [8, 8] for two nodes of eight
            GPUs. The processes of one entry are on one node.
        use_gpu: whether each process has a GPU; several sets of processes of one pool share it.
        name_prefix: prefix of placement groups and actors, to find them in Ray's dashboard.
        max_colocate_count: number of sets of processes that fit into the pool; see
            `RayWorkerGroup`.
        detached: whether processes outlive the driver.
        run_ranks: numbers of the processes among those of all pools of the run, for errors; None:
            the pool is the whole run.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        run_ranks: Sequence[int] | None = None,
    ) -> None:
        self.process_on_nodes = list(process_on_nodes or [])
        if not self.process_on_nodes or min(self.process_on_nodes) < 1 or max_colocate_count < 1:
            raise ConfigError(
                "process_on_nodes must count the processes of each node, and max_colocate_count "
                f"must be at least 1, got {process_on_nodes} and {max_colocate_count}. For two "
                "nodes of eight GPUs give [8, 8]."
            )

        self.world_size = sum(self.process_on_nodes)
        self.use_gpu = use_gpu
        self.max_colocate_count = max_colocate_count
        self.detached = detached
        self.run_ranks = run_ranks
        self.name_prefix = name_prefix or ""
        self._groups: list[PlacementGroup] = []
        self._shared: RayRanks | None = None
        self._all_ranks: list[RayRanks] = []

    def start(
        self,
        role: str,
        worker_class: type[Worker],
        *args: Any,
        deadline_s: float = DEADLINE_S,
        **kwargs: Any,
    ) -> WorkerGroup:
        """Build `worker_class(*args, **kwargs)` on every rank at once; return their group.

        Roles that are started here share their processes.
        """
        if self._shared is None:
            self._shared = self.new_processes()
        return start_role(
            self._shared, role, worker_class, args, kwargs, deadline_s, group_class=RayWorkerGroup
        )

    def new_processes(self, timeout_s: float = 300.0) -> RayRanks:
        """Start one more process for each rank.

        Raises ConfigError if the cluster has no room for them in time.
        """
        part = 1 / self.max_colocate_count
        ranks = RayRanks(
            self.bundles(timeout_s),
            gpus=part if self.use_gpu else 0,
            cpus=part,
            name_prefix=self.name_prefix,
            detached=self.detached,
            run_ranks=self.run_ranks,
        )
        self.include(ranks)
        return ranks

    def include(self, ranks: RayRanks) -> None:
        """End these processes with the pool."""
        self._all_ranks.append(ranks)

    def bundles(self, timeout_s: float = 300.0) -> list[Bundle]:
        """Return the room of each process; reserve it at the first call."""
        if not self._groups:
            self._groups = self._reserve(timeout_s)
        found: list[Bundle] = []
        for group in self._groups:
            found += [(group, number) for number in range(group.bundle_count)]
        return found

    def _check_own_ray(self, bundle: Mapping[str, float]) -> None:
        """Raise ConfigError if the Ray that this run has started is too small; it cannot grow."""
        size = ray.cluster_resources()
        ways_out = {
            "GPU": "Lower trainer.n_gpus_per_node, or join a larger cluster by ray_init.address",
            "CPU": f"Set ray_init.num_cpus={self.world_size} if processes may share cores",
        }
        for kind, way_out in ways_out.items():
            needed = self.world_size * bundle.get(kind, 0.0)
            found = size.get(kind, 0.0)
            if needed > found:
                raise ConfigError(
                    f"{self.world_size} ranks need {needed:g} {kind}s, but this machine's Ray, "
                    f"which the run has started, has {found:g} and cannot grow. "
                    f"{way_out}."
                )

    def _reserve(self, timeout_s: float) -> list[PlacementGroup]:
        bundle = {"CPU": 1.0, "GPU": 1.0} if self.use_gpu else {"CPU": 1.0}
        if is_own():
            self._check_own_ray(bundle)
            timeout_s = min(timeout_s, _OWN_ROOM_S)

        groups: list[PlacementGroup] = []
        for number, count in enumerate(self.process_on_nodes):
            group = placement_group(
                [dict(bundle) for _ in range(count)],
                strategy="STRICT_PACK",
                name=f"{self.name_prefix}verl_pool_{number}_{uuid.uuid4().hex[:8]}",
                lifetime="detached" if self.detached else None,
            )
            groups.append(group)

        soon = min(timeout_s, _SILENT_S)
        if all(group.wait(soon) for group in groups):
            return groups

        if timeout_s > soon:
            logger.warning(
                f"Ray found no room yet for {self.process_on_nodes} processes with {bundle} each: "
                f"{_room(bundle)}. Waiting up to {timeout_s:g} s."
            )
            if all(group.wait(timeout_s - soon) for group in groups):
                return groups

        room = _room(bundle)
        for group in groups:
            remove_placement_group(group)
        raise ConfigError(
            f"Ray found no room for {self.process_on_nodes} processes with {bundle} each "
            f"within {timeout_s:g} s: {room}. Lower trainer.n_gpus_per_node or trainer.nnodes, or "
            "start more nodes (`ray start --address=...`)."
        )

    def shutdown(self) -> None:
        """End all processes of the pool after their current calls, and free its room."""
        for ranks in self._all_ranks:
            ranks.end()
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []
        self._all_ranks = []
        self._shared = None


def _room(kinds: Iterable[str]) -> str:
    """Describe how many CPUs or GPUs the nodes of the cluster have, and how many are free."""
    nodes: list[dict[str, float]] = []
    for node in ray.nodes():
        if node["Alive"]:
            nodes.append({kind: node["Resources"].get(kind, 0) for kind in kinds})
    available = ray.available_resources()
    free = {kind: available.get(kind, 0) for kind in kinds}
    return f"its nodes have {nodes}, of which {free} is free"


class SubRayResourcePool(RayResourcePool):
    """Some processes of other pools, in their room. `shutdown` leaves the room reserved.

    Args:
        parts: (pool, numbers of its processes).
    """

    def __init__(self, parts: Sequence[tuple[RayResourcePool, Sequence[int]]]) -> None:
        self._parts = parts
        self._sources = [pool for pool, _ in parts]
        first = self._sources[0]
        nodes: list[tuple[int, int]] = []
        run_ranks: list[int] = []
        for source, (pool, numbers) in enumerate(parts):
            node_of = _nodes_of(pool.process_on_nodes)
            nodes += [(source, node_of[number]) for number in numbers]
            if pool.run_ranks is not None:
                run_ranks += [pool.run_ranks[number] for number in numbers]

        super().__init__(
            [len(list(same)) for _, same in groupby(nodes)],
            use_gpu=first.use_gpu,
            name_prefix=first.name_prefix,
            max_colocate_count=first.max_colocate_count,
            detached=first.detached,
            run_ranks=run_ranks if len(run_ranks) == len(nodes) else None,
        )

    def bundles(self, timeout_s: float = 300.0) -> list[Bundle]:
        """Return the room of each process, which its pool reserves at the first call."""
        found: list[Bundle] = []
        for pool, numbers in self._parts:
            of_pool = pool.bundles(timeout_s)
            found += [of_pool[number] for number in numbers]
        return found

    def include(self, ranks: RayRanks) -> None:
        """End these processes with the pool, and with those whose room they are in."""
        super().include(ranks)
        for pool in self._sources:
            pool.include(ranks)


def split_resource_pool(
    resource_pool: RayResourcePool, split_size: int | Sequence[int]
) -> list[SubRayResourcePool]:
    """Split a pool, which may be a part itself, into parts of `split_size` processes each.

    Args:
        split_size: one size for all parts, or the size of each; together they have all processes.
    """
    whole = resource_pool.world_size
    if isinstance(split_size, int):
        sizes = [split_size] * (whole // split_size if split_size > 0 else 0)
    else:
        sizes = list(split_size)
    if sum(sizes) != whole or min(sizes) < 1:
        raise ConfigError(
            f"split_size must divide the {whole} processes of the pool, or be a list of sizes with "
            f"this sum, got {split_size}."
        )

    parts = []
    start = 0
    for size in sizes:
        parts.append(SubRayResourcePool([(resource_pool, range(start, start + size))]))
        start += size
    return parts


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> SubRayResourcePool:
    """Return the union of two pools: the processes of the first, then those of the second."""
    for name in ("use_gpu", "max_colocate_count", "detached"):
        if getattr(rp1, name) != getattr(rp2, name):
            raise ConfigError(
                f"Pools to be merged must have the same {name}, got {getattr(rp1, name)} and "
                f"{getattr(rp2, name)}."
            )
    return SubRayResourcePool([(pool, range(pool.world_size)) for pool in (rp1, rp2)])


def _nodes_of(process_on_nodes: Sequence[int]) -> list[int]:
    """Return the number of the node of each process."""
    nodes: list[int] = []
    for node, count in enumerate(process_on_nodes):
        nodes += [node] * count
    return nodes
