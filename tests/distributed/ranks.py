"""Processes that run functions together, as ranks started by torchrun."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.launches import fork_server, free_port

# For one call on all ranks. A rank in a collective that the others never join would otherwise wait
# for 30 minutes.
TIMEOUT_S = 90


class Ranks:
    """`size` processes; `call` runs a module-level function on each and returns their results."""

    def __init__(self, size: int) -> None:
        # A forked process cannot use CUDA after an import has queried the device.
        if torch.cuda.is_available():
            context = multiprocessing.get_context("spawn")
        else:
            context = fork_server()

        port = free_port()
        self.size = size
        self.connections: list[Connection] = []
        self.processes = []

        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size, port), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for connection in self.connections:
            connection.send((function, args))
        answers = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(TIMEOUT_S):
                self.close()
                raise TimeoutError(
                    f"Rank {rank} gave no answer to {function.__name__} within {TIMEOUT_S} s."
                )
            failed, answer = connection.recv()
            if failed:
                self.close()
                raise RuntimeError(f"On rank {rank}:\n{answer}")
            answers.append(answer)

        return answers

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


def _serve(connection: Connection, rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )

    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send((False, function(*args)))
        except Exception:  # noqa: BLE001 - the test process reports the traceback
            connection.send((True, traceback.format_exc()))
