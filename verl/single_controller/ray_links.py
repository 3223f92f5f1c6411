"""Measure the speed between nodes of a Ray cluster through Ray, which carries every batch."""

import itertools
import statistics
import time
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.single_controller.ray import connect

_TRANSFERS = 3  # the fastest one counts, because the first one opens connections


class Link(NamedTuple):
    """The speed from one node to another. If `error` is set, it was not measured."""

    source: str
    target: str
    latency_s: float = 0.0  # there and back, the median
    bytes_per_s: float = 0.0
    error: str | None = None


def _end_class() -> type:
    """Make the class of an actor that measures its node.

    A class that is defined in a function travels by value. Nodes without verl can then be measured,
    and no node waits for the import of torch.
    """

    class End:
        def receive(self, payload: Any) -> int:
            return len(payload)

        def measure(self, other: Any, num_bytes: int, rounds: int) -> tuple[float, float]:
            """Return the seconds of a round trip to the actor `other`, and bytes per second."""
            trips = [self.time(other, b"") for _ in range(rounds)]
            transfers: list[float] = []
            for _ in range(_TRANSFERS):
                # A new object each time, because the other node caches objects.
                payload = ray.put(np.zeros(num_bytes, np.uint8))
                transfers.append(self.time(other, payload))
            return statistics.median(trips), num_bytes / min(transfers)

        def time(self, other: Any, payload: Any) -> float:
            start = time.perf_counter()
            ray.get(other.receive.remote(payload))
            return time.perf_counter() - start

    return End


def measure_links(num_bytes: int, rounds: int, deadline_s: float, **ray_init: Any) -> list[Link]:
    """Measure every ordered pair of alive nodes, one after the other.

    In a cluster of one node, measure between two of its processes. A Ray that was not initialized
    before is shut down afterwards.
    """
    was_initialized = ray.is_initialized()
    connect(**ray_init)
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if len(nodes) == 1:
            nodes = nodes * 2
        ends = [(_name(node), _start(node["NodeID"])) for node in nodes]

        links: list[Link] = []
        for source, target in itertools.permutations(ends, 2):
            links.append(_link(source, target, num_bytes, rounds, deadline_s))
        for _, actor in ends:
            ray.kill(actor)

        return links
    finally:
        if not was_initialized:
            ray.shutdown()


def _name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:8]})"


def _start(node_id: str) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    remote: Any = ray.remote(num_cpus=0, scheduling_strategy=strategy)  # pyright: ignore
    return remote(_end_class()).remote()


def _link(
    source: tuple[str, Any], target: tuple[str, Any], num_bytes: int, rounds: int, deadline_s: float
) -> Link:
    asked = source[1].measure.remote(target[1], num_bytes, rounds)
    try:
        return Link(source[0], target[0], *ray.get(asked, timeout=deadline_s))
    except GetTimeoutError:
        return Link(source[0], target[0], error=f"no answer within {deadline_s:g} s")
    except RayError as error:
        return Link(source[0], target[0], error=" ".join(str(error).split())[-300:])
