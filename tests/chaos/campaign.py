"""Do harm to toy trainings at random moments, start them again, and compare bits.

A try has survived if the fault was noticed in time and the same command, started again, ended with
the bits of a run that was left alone: samples, metrics and weights of every step.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from verl.jobs.compare import compare_runs
from verl.tracking.records import Run, load_run

PROMPTS = 4  # of a step
SAMPLES = 4  # of a prompt
DEADLINE_S = 20.0  # of a call on the ranks
LIMIT_S = 240.0  # of a run; a hang ends there
STEPS = 6
NUM_RANKS = 2
SMALL_DISK_MIB = 24  # two checkpoints and a half
TRAINING = [
    *("data.dataset_name=toy", f"data.train_batch_size={PROMPTS}", "data.max_response_length=8"),
    *(f"actor_rollout_ref.rollout.n={SAMPLES}", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
    *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.num_threads=1"),
    *(f"trainer.max_steps={STEPS}", "trainer.save_freq=1", f"trainer.deadline_s={DEADLINE_S:g}"),
]
TORCHRUN = ["-m", "torch.distributed.run", f"--nproc_per_node={NUM_RANKS}"]
FULLY_ASYNC = "trainer.mode=fully_async"
APART = "trainer.placement.rollout=[1]"
BACKENDS: dict[str, tuple[list[str], list[str]]] = {
    "alone": ([], []),
    "torchrun": (TORCHRUN, []),
    "ray": ([], [f"trainer.n_gpus_per_node={NUM_RANKS}", "ray_init.address=local"]),
    "fully_async": ([], [FULLY_ASYNC]),
    "one_step_off": ([], ["trainer.mode=one_step_off"]),
    "fully_async on two ranks": (TORCHRUN, [FULLY_ASYNC]),
    "one_step_off apart": (TORCHRUN, ["trainer.mode=one_step_off", APART]),
    "staleness 0 apart": (TORCHRUN, [FULLY_ASYNC, APART, "async_training.staleness_threshold=0"]),
    "fully_async apart": (TORCHRUN, [FULLY_ASYNC, APART]),
}
# The draws of a rollout that works during the update depend on the clock: books are compared.
CLOCKED = ("fully_async apart",)
ERROR = re.compile(r"Error|error|Killed|died|gave no sign|exit code")


class Job:
    """A training in processes of its own, and its output with the time of every line."""

    def __init__(self, backend: str, folder: Path, *keys: str, **environment: str) -> None:
        launcher, more = BACKENDS[backend]
        if launcher:
            launcher = [*launcher, f"--master_port={random.randint(20_000, 40_000)}"]
        command = [sys.executable, *launcher, "-m", "verl.trainer.main_ppo", *TRAINING, *more]
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            [*command, f"trainer.default_local_dir={folder}", *keys],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def has_begun(self) -> bool:
        """Whether the first step has ended."""
        return any("[Step 1/" in line for _, line in self.lines)

    def wait_for_a_moment(self, generator: random.Random, usual_s: float) -> None:
        """Wait for a random moment between the first step and the usual end."""
        gives_up_at = time.monotonic() + LIMIT_S
        while not self.has_begun() and self.process.poll() is None:
            assert time.monotonic() < gives_up_at, f"no first step: {self.lines[-5:]}"
            time.sleep(0.02)
        time.sleep(generator.uniform(0, usual_s))

    def ranks(self) -> list[psutil.Process]:
        """The processes that compute."""
        if self.process.poll() is not None:
            return []
        root = psutil.Process(self.process.pid)
        found = []
        for process in [root, *root.children(recursive=True)]:
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            is_launcher = "torch.distributed.run" in command
            is_rank = "verl.trainer.main_ppo" in command and not is_launcher
            if is_rank or any(word.startswith("ray::") for word in command):
                found.append(process)
        return found

    def end(self) -> int:
        """Wait for the end; kill what is left after the limit. Returns the exit code."""
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return -999
        finally:
            self.clean_up()

    def clean_up(self) -> None:
        """Kill the processes of this job."""
        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                try:
                    process.kill()
                except psutil.Error:
                    continue
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(5)

    def error_after(self, moment: float) -> float | None:
        """Return the seconds to the first line of an error; None without one."""
        for when, line in self.lines:
            if when >= moment and ERROR.search(line):
                return when - moment
        return None


# ---- faults: do harm to a job, and return whether it must go on by itself ------------------------


def kill(job: Job, generator: random.Random) -> bool:
    """Kill one rank."""
    ranks = job.ranks()
    if ranks:
        generator.choice(ranks).kill()
    return False


def stop(job: Job, generator: random.Random) -> bool:
    """Stop one rank for good."""
    ranks = job.ranks()
    if ranks:
        generator.choice(ranks).suspend()
    return False


def slow_down(job: Job, generator: random.Random) -> bool:
    """Stop one rank for moments, several times."""
    for _ in range(6):
        for rank in job.ranks()[-1:]:
            rank.suspend()
            time.sleep(generator.uniform(0.1, 0.6))
            rank.resume()
        time.sleep(0.1)
    return True


def limit_memory(job: Job, generator: random.Random) -> bool:
    """Forbid one rank all further address space."""
    for rank in job.ranks()[:1]:
        room = generator.randrange(1 << 20)
        size = rank.memory_info().vms + room
        rank.rlimit(psutil.RLIMIT_AS, (size, size))
    return False


def nothing(job: Job, generator: random.Random) -> bool:
    """Leave the job alone: the fault is in its surroundings."""
    return True


def tear_newest_file(folder: Path, generator: random.Random) -> None:
    """Cut one of the newest files off, as a machine that went down does."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1]
    files = [path for path in files if path.name != ".in_use"]
    files.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    if files:
        torn = generator.choice(files[:4])
        os.truncate(torn, generator.randrange(torn.stat().st_size))


@dataclass(frozen=True)
class Fault:
    """A fault.

    Args:
        harm: done to the job at a random moment; returns whether the job must go on by itself.
        tears: whether a file is torn before the second start.
        clock: whether the wall clock jumps.
        disk: whether the disk is too small for all checkpoints.
        is_noticed: whether the job must report an error itself.
    """

    name: str
    backends: tuple[str, ...]
    harm: Callable[[Job, random.Random], bool]
    tears: bool = False
    clock: bool = False
    disk: bool = False
    is_noticed: bool = False


FAULTS = (
    Fault("kill -9", ("alone",), kill),
    Fault("kill -9", ("torchrun", "ray"), kill, is_noticed=True),
    Fault("kill -9", ("fully_async", "one_step_off"), kill),
    Fault(
        "kill -9",
        ("fully_async on two ranks", "one_step_off apart", "staleness 0 apart", *CLOCKED),
        kill,
        is_noticed=True,
    ),
    Fault("SIGSTOP", ("torchrun", "ray"), stop, is_noticed=True),
    Fault("slow rank", ("alone", "torchrun"), slow_down),
    Fault("kill -9 and a torn file", ("alone", "torchrun"), kill, tears=True),
    Fault("no more memory", ("alone",), limit_memory),
    Fault("full disk", ("alone",), nothing, disk=True),
    Fault("clock jumps", ("alone", "torchrun"), nothing, clock=True),
)


@dataclass
class Row:
    """A row of the table."""

    fault: str
    backend: str
    tries: int = 0
    survived: int = 0
    error_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        slowest = f"{max(self.error_s):.1f} s" if self.error_s else ""
        cells = (self.fault, self.backend, str(self.tries), str(self.survived), slowest)
        return f"| {' | '.join(cells)} |"


HEAD = "| fault | backend | tries | survived | slowest error |\n|---|---|---|---|---|"


class Campaign:
    """Tries of faults in a folder, against undisturbed runs of every backend."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.seed = seed
        self._undisturbed: dict[str, tuple[Path, float]] = {}

    def run(self, fault: Fault, backend: str, tries: int) -> Row:
        """Try a fault several times."""
        row = Row(fault.name, backend)
        for number in range(tries):
            generator = random.Random(f"{self.seed} {fault.name} {backend} {number}")
            row.tries += 1
            folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=self.root))
            try:
                problem = self._try(fault, backend, folder / "run", generator, row)
            finally:
                if fault.disk:
                    subprocess.run(["umount", folder], check=False, capture_output=True)
                shutil.rmtree(folder, ignore_errors=True)
            row.survived += problem is None
            if problem is not None:
                row.failures.append(f"{fault.name}, {backend}, try {number}: {problem}")
        return row

    def undisturbed(self, backend: str) -> tuple[Path, float]:
        """Return the folder of a run that was left alone, and its seconds after the first step."""
        if backend not in self._undisturbed:
            folder = self.root / f"undisturbed-{backend}"
            job = Job(backend, folder)
            code = job.end()
            assert code == 0, job.lines[-10:]
            begin = next(when for when, line in job.lines if "[Step 1/" in line)
            self._undisturbed[backend] = folder, job.lines[-1][0] - begin
        return self._undisturbed[backend]

    def _try(
        self, fault: Fault, backend: str, folder: Path, generator: random.Random, row: Row
    ) -> str | None:
        """Return the problem of a try; None if it survived."""
        undisturbed, usual_s = self.undisturbed(backend)
        keys = []
        environment = {}
        if fault.clock:
            keys = [
                f"actor_rollout_ref.model.external_lib={Path(__file__).with_name('clock_jump.py')}"
            ]
            environment = {"CHAOS_CLOCK_CALLS": str(generator.randrange(20, 200))}
        if fault.disk:
            size = generator.randrange(SMALL_DISK_MIB // 2, SMALL_DISK_MIB)
            _mount(folder.parent, size)

        job = Job(backend, folder, *keys, **environment)
        job.wait_for_a_moment(generator, usual_s)
        was_running = job.process.poll() is None
        moment = time.monotonic()
        goes_on = fault.harm(job, generator)
        code = job.end()
        if code == -999:
            return f"hung; last line: {job.lines[-1][1]}"
        if goes_on and not fault.disk and code != 0:
            return f"ended with {code}: {job.lines[-1][1]}"
        seconds = job.error_after(moment)
        if seconds is not None:
            row.error_s.append(seconds)
        must_report = fault.is_noticed and was_running and code != 0
        if must_report and (seconds is None or seconds > DEADLINE_S + 5):
            return f"error after {seconds} s"

        if fault.tears:
            tear_newest_file(folder, generator)
        if fault.disk:
            subprocess.run(["mount", "-o", "remount,size=1g", folder.parent], check=True)
        again = Job(backend, folder, *keys, **environment)
        code = again.end()
        if code != 0 and fault.tears and any("is sound" in line for _, line in again.lines):
            # The only checkpoint was torn: a run starts over when it is asked to, not by itself.
            again = Job(backend, folder, *keys, "trainer.resume_mode=disable", **environment)
            code = again.end()
        if code != 0:
            return f"did not resume ({code}): {[line for _, line in again.lines[-3:]]}"
        if backend in CLOCKED:
            return lost_or_repeated(load_run(folder))
        found = compare_runs(load_run(undisturbed), load_run(folder))
        if found.differences:
            return f"other bits: {found.differences[0]}"
        if found.steps[-1] != STEPS:
            return f"compared to step {found.steps[-1]} alone"
        return None


def lost_or_repeated(run: Run) -> str | None:
    """Return the prompt that a run has not learned from exactly once, if there is one."""
    groups: Counter[str] = Counter()
    for step in run.kept_steps:
        samples = run.samples(step)
        groups.update(samples[row].uid for row in range(len(samples)))

    uids = [f"{step}-{row}" for step in range(1, STEPS + 1) for row in range(PROMPTS)]
    expected = Counter(dict.fromkeys(uids, SAMPLES))
    for uid in [*expected, *groups]:
        if groups[uid] != expected[uid]:
            return f"learned from {groups[uid]} samples of prompt {uid}, not {expected[uid]}"
    return None


def _mount(folder: Path, size_mib: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "none", folder], check=True)
