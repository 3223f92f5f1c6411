"""Do harm to toy trainings at random moments, start them again, and compare bits.

A try has survived if the fault was noticed in time and the same command, started again, ended with
the bits of a run that was left alone: samples, metrics and weights of every step.
"""

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.job import DEADLINE_S, PROMPTS, SAMPLES, STEPS, Job
from tests.chaos.machines import TwoMachinesJob
from verl.jobs.compare import compare_runs
from verl.tracking.records import Run, load_run

CGROUPS = Path(
    "/sys/fs/cgroup/memory" if Path("/sys/fs/cgroup/memory").is_dir() else "/sys/fs/cgroup"
)
ON_TWO_MACHINES = {"torchrun, two machines": "torchrun", "ray, two machines": "ray"}
# Draws that depend on the clock, where a rollout works during the update or tools take their time:
# books are compared.
CLOCKED = ("fully_async apart", "fully_async apart on Ray", "agents", "agents apart")


# ---- faults: do harm to a job, and return whether it must go on by itself ------------------------


def kill(job: Job, generator: random.Random) -> bool:
    """Kill one rank, or the driver of the ranks."""
    ranks = job.ranks()
    if ranks:
        victim = generator.choice(ranks)
        victim.kill()
        # On Ray the driver is a process that can be killed, too, and then can say nothing.
        job.can_report = victim.pid != job.process.pid
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


def kill_by_memory_limit(job: Job, generator: random.Random) -> bool:
    """Have the kernel kill one rank, by a cgroup that has no room for more of its memory."""
    ranks = job.ranks()
    if ranks:
        rank = generator.choice(ranks)
        group = CGROUPS / f"verl-chaos-{rank.pid}"
        group.mkdir()
        job.undo.append(group.rmdir)
        names = ("memory.limit_in_bytes", "memory.max")  # of cgroups 1 and 2
        (limit,) = [group / name for name in names if (group / name).exists()]
        limit.write_text(str(generator.randrange(1 << 20, 8 << 20)))
        (group / "cgroup.procs").write_text(str(rank.pid))
        job.can_report = rank.pid != job.process.pid
    return False


def fill_disk(job: Job, generator: random.Random) -> bool:
    """Fill the disk of the run."""
    with (job.folder.parent / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    return True


def cut_link(job: Job, generator: random.Random) -> bool:
    """Cut the link between two machines."""
    assert isinstance(job, TwoMachinesJob)
    job.machines.cut_link()
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
        disk: MiB of the disk at most, or 0 for any. A random size is at least half of it.
        is_noticed: whether the job must report an error itself.
    """

    name: str
    backends: tuple[str, ...]
    harm: Callable[[Job, random.Random], bool]
    tears: bool = False
    clock: bool = False
    disk: int = 0
    is_noticed: bool = False


FAULTS = (
    Fault("kill -9", ("alone",), kill),
    Fault("kill -9", ("torchrun", "ray"), kill, is_noticed=True),
    Fault("kill -9", ("fully_async", "one_step_off", "agents"), kill),
    Fault(
        "kill -9",
        (
            *("fully_async on two ranks", "one_step_off apart", "staleness 0 apart"),
            *("fully_async apart", "agents apart"),
            *("one_step_off apart on Ray", "staleness 0 apart on Ray"),
            "fully_async apart on Ray",
        ),
        kill,
        is_noticed=True,
    ),
    Fault("SIGSTOP", ("torchrun", "ray"), stop, is_noticed=True),
    Fault("slow rank", ("alone", "torchrun"), slow_down),
    Fault("kill -9 and a torn file", ("alone", "torchrun"), kill, tears=True),
    Fault("no more memory", ("alone",), limit_memory),
    Fault("memory limit", ("alone",), kill_by_memory_limit),
    Fault("memory limit", ("torchrun", "ray"), kill_by_memory_limit, is_noticed=True),
    Fault("small disk", ("alone",), nothing, disk=24),  # two checkpoints and a half
    Fault("disk fills up", ("alone", "torchrun"), fill_disk, disk=512),
    Fault("clock jumps", ("alone", "torchrun"), nothing, clock=True),
    Fault("cut link", tuple(ON_TWO_MACHINES), cut_link, is_noticed=True),
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
    """Tries of faults in a folder, against undisturbed runs of every backend.

    Args:
        usual_s: seconds of a run after its first step, of clocked backends. Their books are
            checked alone, so they need no undisturbed run where the time is given.
    """

    def __init__(
        self, root: Path, seed: int, deadline_s: float = DEADLINE_S, usual_s: float | None = None
    ) -> None:
        self.root = root
        self.seed = seed
        self.deadline_s = deadline_s
        self.usual_s = usual_s
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

    def _start(self, backend: str, folder: Path, *keys: str, **environment: str) -> Job:
        keys = (f"trainer.deadline_s={self.deadline_s:g}", *keys)
        if backend in ON_TWO_MACHINES:
            return TwoMachinesJob(ON_TWO_MACHINES[backend], folder, *keys, **environment)
        return Job(backend, folder, *keys, **environment)

    def undisturbed(self, backend: str) -> tuple[Path, float]:
        """Return the folder of a run that was left alone, and its seconds after the first step."""
        if backend not in self._undisturbed:
            folder = self.root / f"undisturbed-{len(self._undisturbed)}"
            job = self._start(backend, folder)
            code = job.end()
            assert code == 0, job.lines[-10:]
            begin = next(when for when, line in job.lines if "[Step 1/" in line)
            self._undisturbed[backend] = folder, job.lines[-1][0] - begin
        return self._undisturbed[backend]

    def _try(
        self, fault: Fault, backend: str, folder: Path, generator: random.Random, row: Row
    ) -> str | None:
        """Return the problem of a try; None if it survived."""
        undisturbed: Path | None = None
        usual_s = self.usual_s
        if usual_s is None or backend not in CLOCKED:
            undisturbed, usual_s = self.undisturbed(backend)
        keys = []
        environment = {}
        if fault.clock:
            keys = [
                f"actor_rollout_ref.model.external_lib={Path(__file__).with_name('clock_jump.py')}"
            ]
            environment = {"CHAOS_CLOCK_CALLS": str(generator.randrange(20, 200))}
        if fault.disk:
            _mount(folder.parent, generator.randrange(fault.disk // 2, fault.disk))

        job = self._start(backend, folder, *keys, **environment)
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
        must_report = fault.is_noticed and was_running and job.can_report and code != 0
        if must_report and (seconds is None or seconds > self.deadline_s + 5):
            return f"error after {seconds} s: {[line for _, line in job.lines[-5:]]}"
        if job.left:
            return f"processes left: {job.left}"

        if fault.tears:
            tear_newest_file(folder, generator)
        if fault.disk:
            subprocess.run(["mount", "-o", "remount,size=1g", folder.parent], check=True)
        again = self._start(backend, folder, *keys, **environment)
        code = again.end()
        if code != 0 and fault.tears and any("is sound" in line for _, line in again.lines):
            # The only checkpoint was torn: a run starts over when it is asked to, not by itself.
            fresh = [*keys, "trainer.resume_mode=disable"]
            again = self._start(backend, folder, *fresh, **environment)
            code = again.end()
        if code != 0:
            return f"did not resume ({code}): {[line for _, line in again.lines[-9:]]}"
        if undisturbed is None or backend in CLOCKED:
            return lost_or_repeated(load_run(folder))
        found = compare_runs(load_run(undisturbed), load_run(folder))
        if found.differences:
            return f"other bits: {found.differences[0]}"
        if found.steps[-1] != STEPS:
            return f"compared to step {found.steps[-1]} alone"
        return None


def lost_or_repeated(run: Run) -> str | None:
    """Describe the prompts that a run has not learned from exactly once, if there are any.

    A process that is killed may not have written the samples of its last step, though the step's
    checkpoint is there: the prompts of that step are not known, but their number is.
    """
    groups: Counter[str] = Counter()
    for step in run.kept_steps:
        samples = run.samples(step)
        groups.update(samples[row].uid for row in range(len(samples)))

    uids = {f"{step}-{row}" for step in range(1, STEPS + 1) for row in range(PROMPTS)}
    for uid, count in groups.items():
        if uid not in uids or count != SAMPLES:
            return f"learned from {count} samples of prompt {uid}"
    unwritten = STEPS - len(run.kept_steps)
    missing = sorted(uids - groups.keys())
    if len(missing) != PROMPTS * unwritten:
        return f"{unwritten} of {STEPS} steps have no samples, but {missing} are missing"
    return None


def _mount(folder: Path, size_mib: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "none", folder], check=True)
