"""Programs on ranks like torchrun starts them, without its start-up seconds: forks of one process
that has imported the packages."""

import atexit
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

# Modules of all programs: the first test that forks starts the single server of its pytest process.
PROGRAMS = [
    "peft",
    "tests.rewards.batches",
    "transformers.models.qwen2.modeling_qwen2",
    "tests.distributed.jobs",
    "tests.single_controller.workers",
    "verl.jobs.main_generation",
    "verl.jobs.main_sft",
    "verl.rewards.managers",
    "verl.single_controller.spmd",
    "verl.trainer.main_ppo",
    "verl.trainer.variants",
]
# torchrun gives the other ranks this long to end after one has failed.
GRACE_S = 30.0


@dataclass(frozen=True)
class Done:
    """Result of a launch: the first exit code other than 0, and the output of all ranks."""

    returncode: int
    stdout: str
    stderr: str


def fork_server() -> Any:
    """Return the context of forks, with the packages of all programs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launch(
    ranks: int,
    program: Callable[..., int | None],
    *arguments: Any,
    folder: Path | None = None,
    timeout_s: float = 150.0,
) -> Done:
    """Run `program(*arguments)`, a function of a module, on every rank, in `folder`.

    The result of the function is the exit code. When a rank fails, the others get SIGTERM.
    """
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    of_ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return _run(of_ranks, program, arguments, folder, timeout_s)


def run_code(code: str, timeout_s: float = 150.0) -> Done:
    """Run `python -c code` in a process that has the packages of all programs."""
    return _run([{}], _execute, (code,), None, timeout_s)


def run_file(path: Path, arguments: list[str], timeout_s: float = 150.0) -> Done:
    """Run `python path arguments` in a process that has the packages of all programs."""
    return _run([{}], _execute_file, (path, arguments), None, timeout_s)


def run_module(name: str, arguments: list[str]) -> None:
    """Run `python -m name arguments`, as a program of `launch`."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _execute(code: str) -> None:
    exec(compile(textwrap.dedent(code), "<code>", "exec"), {"__name__": "__main__"})


def _execute_file(path: Path, arguments: list[str]) -> None:
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")


def _run(
    of_processes: Sequence[Mapping[str, str]],
    program: Callable[..., int | None],
    arguments: tuple[Any, ...],
    folder: Path | None,
    timeout_s: float,
) -> Done:
    """Run one process for each set of additional variables."""
    where = Path.cwd() if folder is None else folder

    with tempfile.TemporaryDirectory() as outputs:
        processes = []
        for variables in of_processes:
            process = fork_server().Process(
                target=_main, args=(os.environ | variables, outputs, where, program, arguments)
            )
            process.start()
            processes.append(process)
        returncode = _wait(processes, timeout_s)
        stdout = Path(outputs, "stdout").read_text()
        stderr = Path(outputs, "stderr").read_text()

    return Done(returncode, stdout, stderr)


def _wait(processes: list[BaseProcess], timeout_s: float) -> int:
    """Wait for all processes. Returns the first exit code other than 0."""
    ends_at = time.monotonic() + timeout_s
    running = list(processes)
    returncode = 0

    while running:
        seconds = max(ends_at - time.monotonic(), 0)
        if not wait([process.sentinel for process in running], seconds):
            for process in running:
                process.kill()
            raise TimeoutError(f"{len(running)} ranks did not end within {timeout_s:g} s.")
        for process in [process for process in running if process.exitcode is not None]:
            running.remove(process)
            if process.exitcode and not returncode:
                returncode = process.exitcode
                ends_at = time.monotonic() + GRACE_S
                for other in running:
                    other.terminate()

    return returncode


def _main(
    variables: dict[str, str],
    outputs: str,
    folder: Path,
    program: Callable[..., int | None],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    for stream in (sys.stdout, sys.stderr):
        name = "stdout" if stream is sys.stdout else "stderr"
        file = os.open(Path(outputs, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream.fileno())
        os.close(file)
    torch.set_num_threads(1)
    try:
        sys.exit(program(*arguments))
    finally:
        # Like every program at its end, but unlike a child of multiprocessing.
        atexit._run_exitfuncs()
