"""The cost of the single controller: an empty call to many workers, and batches to two workers.

    python bench/controller.py            # both backends
    python bench/controller.py spmd

A batch goes to the workers and back, and through two calls, of which the second takes the answer of
the first. Prints the median and the best of the repeats. On ray, empty methods of bare actors are
called in turn with ours, as a measure of the time that Ray itself takes.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from verl.protocol import DataProto
from verl.single_controller import Dispatch, Worker, register
from verl.single_controller.spmd import ResourcePool, join

EMPTY_CALLS = 600
EMPTY_WORKERS = 8
ROUNDS = 20
BATCHES = 10
BATCH_WORKERS = 2
BATCH_MB = 100
RANK = "rank"  # in place of a backend: a rank that `launch_spmd` started


class Echo(Worker):
    """Returns its input."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None: ...

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def same(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"row": batch.batch["column_0"][:, 0].clone()})


def seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    """Return the seconds of each call after a first one."""
    call()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return taken


def measure(backend: str, pool: ResourcePool) -> None:
    """Measure empty calls in the larger pool, and batches in the smaller one."""
    group = pool.start("echo", Echo)
    if pool.world_size == EMPTY_WORKERS:
        measure_empty_calls(backend, group)
    else:
        measure_batches(backend, group)
    pool.shutdown()


def measure_empty_calls(backend: str, group: Any) -> None:
    aim_ms = 2 if backend == "spmd" else 5
    calls = {f"empty call, {EMPTY_WORKERS} workers, aim {aim_ms} ms": group.nothing}
    if backend == "ray":
        calls[f"the same of {EMPTY_WORKERS} bare actors"] = bare_call()

    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            taken[name] += seconds(call, EMPTY_CALLS // ROUNDS)
    for name in calls:
        report(backend, name, taken[name])


def measure_batches(backend: str, group: Any) -> None:
    num_columns = 5
    width = BATCH_MB * 10**6 // 4 // 1024 // num_columns
    columns = {f"column_{number}": torch.rand(1024, width) for number in range(num_columns)}
    batch = DataProto.from_dict(tensors=columns)
    calls = {
        "there and back, aim 300 ms": lambda: group.same(batch),
        "there and on to the next call, through the driver": lambda: group.rows(group.same(batch)),
        "there and on to the next call, as a future": lambda: group.rows(
            group.same(batch, blocking=False)
        ),
    }
    for name, call in calls.items():
        report(backend, f"{BATCH_MB} MB {name}", seconds(call, BATCHES))


def bare_call() -> Callable[[], Any]:
    """Return a call of an empty method of as many plain actors of Ray."""
    import ray

    @ray.remote(num_cpus=0)
    class Actor:
        def nothing(self, call: bytes) -> None: ...

    actors: list[Any] = [Actor.remote() for _ in range(EMPTY_WORKERS)]
    return lambda: ray.get([actor.nothing.remote(bytes(200)) for actor in actors])


def report(backend: str, name: str, taken: list[float]) -> None:
    """Print a line of one kind of call."""
    median = statistics.median(taken) * 1e3
    best = min(taken) * 1e3
    print(f"{backend}: {name}: median {median:.2f} ms, best {best:.2f} ms", flush=True)


def launch_spmd(size: int) -> None:
    """Run this script on every rank, without the start-up of torchrun's agent."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    processes = []
    for rank in range(size):
        environment = os.environ | common | {"RANK": str(rank), "MASTER_PORT": str(port)}
        processes.append(subprocess.Popen([sys.executable, __file__, RANK], env=environment))

    for process in processes:
        process.wait()


def main() -> None:
    if sys.argv[1:] == [RANK]:
        measure("spmd", join())
        return

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backends", nargs="*", help="spmd, ray [both]")
    backends = parser.parse_args().backends or ["spmd", "ray"]
    for backend in backends:
        if backend not in ("spmd", "ray"):
            parser.error(f"a backend must be spmd or ray, got '{backend}'.")

    if "spmd" in backends:
        launch_spmd(EMPTY_WORKERS)
        launch_spmd(BATCH_WORKERS)
    if "ray" in backends:
        from verl.single_controller.ray import RayResourcePool, connect

        connect(address="local", num_cpus=EMPTY_WORKERS, include_dashboard=False)
        for size in (EMPTY_WORKERS, BATCH_WORKERS):
            measure("ray", RayResourcePool([size], use_gpu=False))


if __name__ == "__main__":
    main()
