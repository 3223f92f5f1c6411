"""What the single controller costs: an empty call to many workers, a batch to two workers and back,
and the same batch through two calls, whose first answer goes into the second.

python bench/controller.py [spmd|ray ...]: both by default. Prints the median and the best of the
repeats. On ray, empty methods of bare actors are called in turn with ours, which tells what Ray
itself takes on the machine at that time.
"""

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


class Echo(Worker):
    """Gives back what it gets."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None: ...

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def same(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"row": batch.batch["column_0"][:, 0].clone()})


def seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    call()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return sorted(taken)


def measure(backend: str, pool: ResourcePool) -> None:
    group = pool.start("echo", Echo)
    if pool.world_size == EMPTY_WORKERS:
        aim = 2 if backend == "spmd" else 5
        calls = {f"empty call, {EMPTY_WORKERS} workers, aim {aim} ms": group.nothing}
        if backend == "ray":
            calls |= {f"the same of {EMPTY_WORKERS} bare actors": bare_call()}
        taken = {what: list[float]() for what in calls}
        for _ in range(ROUNDS):
            for what, call in calls.items():
                taken[what] += seconds(call, EMPTY_CALLS // ROUNDS)
        for what in calls:
            tell(backend, what, sorted(taken[what]))
    else:
        columns = {
            f"column_{i}": torch.rand(1024, BATCH_MB * 10**6 // 4 // 1024 // 5) for i in range(5)
        }
        batch = DataProto.from_dict(tensors=columns)
        tell(
            backend,
            f"{BATCH_MB} MB there and back, aim 300 ms",
            seconds(lambda: group.same(batch), BATCHES),
        )
        read = seconds(lambda: group.rows(group.same(batch)), BATCHES)
        handed_on = seconds(lambda: group.rows(group.same(batch, blocking=False)), BATCHES)
        tell(backend, f"{BATCH_MB} MB there and on to the next call, through the driver", read)
        tell(backend, f"{BATCH_MB} MB there and on to the next call, as a future", handed_on)

    pool.shutdown()


def bare_call() -> Callable[[], Any]:
    """Calls an empty method of as many actors that are nothing but Ray's."""
    import ray

    @ray.remote(num_cpus=0)
    class Actor:
        def nothing(self, call: bytes) -> None: ...

    actors: list[Any] = [Actor.remote() for _ in range(EMPTY_WORKERS)]
    return lambda: ray.get([actor.nothing.remote(bytes(200)) for actor in actors])


def tell(backend: str, what: str, taken: list[float]) -> None:
    median = statistics.median(taken) * 1e3
    best = taken[0] * 1e3
    print(f"{backend}: {what}: median {median:.2f} ms, best {best:.2f} ms", flush=True)


def launch_spmd(size: int) -> None:
    """This program on every rank, as torchrun would, without the seconds that its agent takes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "rank"],
            env=os.environ | common | {"RANK": str(rank), "MASTER_PORT": str(port)},
        )
        for rank in range(size)
    ]
    for process in processes:
        process.wait()


def main() -> None:
    if sys.argv[1:] == ["rank"]:
        measure("spmd", join())
        return
    backends = sys.argv[1:] or ["spmd", "ray"]
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
