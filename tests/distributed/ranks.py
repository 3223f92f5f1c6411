"""Processes that run functions together, as ranks started by torchrun."""

import faulthandler
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
    """`size` processes; `call` runs a module-level function on each and returns their results.

    After a failure, the next call starts new ones: a rank that died, or waits for one that did,
    must not fail other tests.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        self._start()

    def _start(self) -> None:
        # A forked process cannot use CUDA after an import has queried the device.
        if torch.cuda.is_available():
            context = multiprocessing.get_context("spawn")
        else:
            context = fork_server()

        port = free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self.size, port)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self.processes:
            self._start()
        try:
            for connection in self.connections:
                connection.send((function, args))
            return [self._answer(rank, function.__name__) for rank in range(self.size)]
        except BaseException:
            self.close()
            raise

    def _answer(self, rank: int, name: str) -> Any:
        if not self.connections[rank].poll(TIMEOUT_S):
            raise TimeoutError(f"Rank {rank} gave no answer to {name} within {TIMEOUT_S} s.")
        try:
            failed, answer = self.connections[rank].recv()
        except EOFError as error:
            self.processes[rank].join(TIMEOUT_S)
            code = self.processes[rank].exitcode
            raise RuntimeError(f"Rank {rank} ended with code {code} in {name}.") from error
        if failed:
            raise RuntimeError(f"On rank {rank}:\n{answer}")
        return answer

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()
        self.connections.clear()
        self.processes.clear()


def _serve(connection: Connection, rank: int, size: int, port: int) -> None:
    faulthandler.enable()  # a crash names the place
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
