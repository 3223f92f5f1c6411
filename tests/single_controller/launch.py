"""Start ranks like torchrun, without its start-up seconds: forks of one process that has imported
everything."""

import atexit
import contextlib
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests.launches import fork_server, free_port


@dataclass(frozen=True)
class Run:
    """Result of the driver, or the error that it raised; and how the processes ended."""

    value: Any
    error: tuple[str, str] | None
    exit_codes: list[int | None]  # None: still running


def launch(
    scenario: Callable[..., Any],
    *args: Any,
    size: int = 2,
    timeout_s: float = 120.0,
    silence_s: float = 300.0,
) -> Run:
    """Run `scenario(pool, *args)` on rank 0 of `size` ranks that call `join()`."""
    context = fork_server()
    port = free_port()
    ours, theirs = context.Pipe()
    processes = [
        context.Process(
            target=_rank,
            args=(rank, size, port, silence_s, theirs if rank == 0 else None, scenario, args),
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()

    theirs.close()
    started = time.perf_counter()
    value = None
    error = ("no answer", "")

    if ours.poll(timeout_s):
        with contextlib.suppress(EOFError):  # the driver has died
            value, error = ours.recv()

    for process in processes:
        process.join(max(timeout_s - (time.perf_counter() - started), 1.0))
    exit_codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()

    return Run(value, error, exit_codes)


def _rank(
    rank: int,
    size: int,
    port: int,
    silence_s: float,
    answer: Connection | None,
    scenario: Any,
    args: tuple[Any, ...],
) -> None:
    import torch

    from verl.single_controller import calls
    from verl.single_controller.spmd import join

    torch.set_num_threads(1)
    calls.GRACE_S = 0.5
    calls.ANSWER_S = 1.5
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    pool: Any = join(connect_timeout_s=60, silence_s=silence_s)
    assert answer is not None, "only the driver comes back from join"
    try:
        answer.send((scenario(pool, *args), None))
    except Exception as error:  # noqa: BLE001 - a process boundary: the test inspects the error
        traceback.print_exc()
        answer.send((None, (type(error).__name__, str(error))))
    atexit._run_exitfuncs()  # as in every program, but not in children of multiprocessing
