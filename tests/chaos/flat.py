"""`python -m tests.chaos.flat [--steps N] [--backend alone|torchrun|ray] [key=value ...]`: train the
toy with records, checkpoints and validation, and fail if memory, files, threads, processes, shared
memory or temporary files grow with the steps.

Caches of a bounded size fill first: the ring of the latest spans of a rank is full after some 800
steps. Under torchrun, whose ranks take 40 MiB more until then, use --steps 2000.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
import psutil

from tests.chaos.job import BACKENDS, Job

SAMPLES = 20  # of a run, evenly spaced
WARM_UP = 0.3  # share of the steps in which caches fill
STEP = re.compile(r"\[Step (\d+)/")


@dataclass(frozen=True)
class Usage:
    """The resources of all processes of a run, and of its folders."""

    memory_mib: float  # unshared pages, which no other process counts
    open_files: float
    threads: float
    processes: float
    shared_memory: float  # files
    temporary_files: float
    run_files: float


# Growth over the whole run that noise explains: an allocator keeps what it once took, and a sample
# may fall into the writing of a checkpoint, which takes a thread and some files.
ALLOWED = Usage(
    memory_mib=24,
    open_files=3,
    threads=1,
    processes=0.5,
    shared_memory=0.5,
    temporary_files=0.5,
    run_files=8,
)


def usage(root: psutil.Process, temporary: Path, folder: Path) -> Usage:
    """Measure the processes below `root` with it, and the files in two folders."""
    memory = 0
    open_files = 0
    threads = 0
    processes = [root, *root.children(recursive=True)]
    shared: set[str] = set()
    for process in processes:
        try:
            memory += process.memory_full_info().uss
            open_files += process.num_fds()
            threads += process.num_threads()
            maps = process.memory_maps()
        except psutil.Error:  # a helper that has just ended
            continue
        shared.update(
            entry.path for entry in maps if entry.path.startswith(("/dev/shm/", "/memfd:"))
        )
    return Usage(
        memory_mib=memory / 2**20,
        open_files=open_files,
        threads=threads,
        processes=len(processes),
        shared_memory=len(shared),
        temporary_files=_count(temporary),
        run_files=_count(folder),
    )


def growth(steps: Sequence[int], usages: Sequence[Usage]) -> Usage:
    """Fit a line through each resource after the warm-up. Returns its rise over the whole run.

    The slope is the median of the slopes between all pairs of samples (Theil and Sen), so a few
    samples that fall into the writing of a checkpoint do not matter.
    """
    steady = [number for number, step in enumerate(steps) if step >= WARM_UP * steps[-1]]
    table = np.array([astuple(usages[number]) for number in steady], dtype=float)
    x = np.array([steps[number] for number in steady], dtype=float)
    earlier, later = np.triu_indices(len(x), 1)
    slopes = (table[later] - table[earlier]) / (x[later] - x[earlier])[:, None]
    return Usage(*(np.median(slopes, axis=0) * steps[-1]).tolist())


def too_much(rise: Usage) -> list[str]:
    """Name the resources that grow by more than noise explains."""
    found = []
    for field, value, allowed in zip(fields(Usage), astuple(rise), astuple(ALLOWED)):
        if value > allowed:
            found.append(f"{field.name} grows by {value:.1f} (allowed: {allowed:g})")
    return found


def measure(backend: str, num_steps: int, keys: Sequence[str]) -> tuple[list[int], list[Usage]]:
    """Train, and measure at evenly spaced steps. Prints a row of the table for each."""
    every = max(1, num_steps // SAMPLES)
    steps: list[int] = []
    usages: list[Usage] = []
    with tempfile.TemporaryDirectory(prefix="verl-flat-") as root:
        folder = Path(root) / "run"
        temporary = Path(root) / "tmp"
        temporary.mkdir()
        job = Job(
            backend,
            folder,
            *(f"trainer.max_steps={num_steps}", f"trainer.log_interval={every}"),
            *(f"trainer.save_freq={every // 2}", "trainer.max_actor_ckpt_to_keep=2"),
            *(f"trainer.test_freq={every // 2}", "actor_rollout_ref.actor.optim.lr=1e-4"),
            *keys,
            TMPDIR=str(temporary),
        )
        try:
            seen = 0
            while job.process.poll() is None:
                time.sleep(0.05)
                lines = [line for _, line in job.lines[seen:]]
                seen += len(lines)
                found = [STEP.search(line) for line in lines]
                numbers = [int(match.group(1)) for match in found if match is not None]
                if numbers and numbers[-1] < num_steps:
                    steps.append(numbers[-1])
                    usages.append(usage(psutil.Process(job.process.pid), temporary, folder))
                    print(_row(numbers[-1], usages[-1]), flush=True)
            assert job.process.returncode == 0, job.lines[-10:]
        finally:
            job.clean_up()
    return steps, usages


def main() -> int:
    """Train and print the table. Returns 1 if a resource grows."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.flat", description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--backend", choices=list(BACKENDS), default="alone")
    parser.add_argument("keys", nargs="*", help="key=value")
    arguments = parser.parse_args()

    names = [field.name.replace("_", " ") for field in fields(Usage)]
    print(f"| step | {' | '.join(names)} |")
    print("|---" * (len(names) + 1) + "|", flush=True)
    steps, usages = measure(arguments.backend, arguments.steps, arguments.keys)

    rise = growth(steps, usages)
    print(_row("growth", rise))
    problems = too_much(rise)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def _count(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


def _row(name: object, values: Usage) -> str:
    return f"| {name} | {' | '.join(f'{value:.4g}' for value in astuple(values))} |"


if __name__ == "__main__":
    sys.exit(main())
