"""Are faults noticed, named and cleaned up? Toy trainings in which a process dies, stops or raises.

    python bench/faults.py                # all cases
    python bench/faults.py SIGSTOP ray    # those that contain every word

Prints a table: fault, backend, phase, seconds to the error, whether its first line names the right
process, and processes left 30 s after it. Exit code 1 if a fault is not noticed within the
deadline, wrongly named, or leaves a process.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psutil

DEADLINE_S = 20.0
LEFT_S = 30.0
GIVE_UP_S = DEADLINE_S + 40.0  # so that an error that comes too late is seen as well
START_S = 180.0
MARK = "VERL_FAULT_RUN"  # in the environment of every process of a case
UPDATE = "update_actor"
ROLLOUT = "generate_sequences"
TRAINING = [
    "data.dataset_name=toy",
    "data.train_batch_size=4",
    "data.max_response_length=8",
    "actor_rollout_ref.rollout.n=4",
    f"actor_rollout_ref.model.external_lib={Path(__file__).with_name('fault_injection.py')}",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.num_threads=1",
    "trainer.max_steps=100000",
    "trainer.resume_mode=disable",
    'trainer.logger=["console"]',
    f"trainer.deadline_s={DEADLINE_S:g}",
]
ERROR = re.compile(
    r"WorkerLostError|WorkerError|DeadlineError|KeyError|launcher \(torchrun\)|GCS, "
)


@dataclass
class Case:
    """A fault, and how the first line of the error must name it."""

    fault: str
    backend: str  # torchrun, ray or alone
    phase: str
    names: str  # a pattern
    rank: int = 0
    victim: str = ""  # a process outside the ranks, by its command line

    def __str__(self) -> str:
        who = self.victim or f"rank {self.rank}"
        return f"{self.fault} of {who}, {self.backend}, {self.phase}"


@dataclass
class Outcome:
    """The result of a case."""

    seconds: float | None
    first_line: str
    rightly_named: bool
    left: list[str] = field(default_factory=list)


def all_cases() -> list[Case]:
    """Return every case, in the order of the table."""
    cases = []
    for backend, ranks in (("torchrun", (0, 1)), ("ray", (0, 1)), ("alone", (0,))):
        for rank in ranks:
            drives = rank == 0 and backend == "torchrun"
            died = "rank 0, which drives this run, died" if drives else rf"rank {rank} \(.*died"
            stuck = (
                "rank 0 .*drives this run, gave no sign" if drives else rf"rank {rank} \(.*not a"
            )
            if backend == "alone":
                died = "exit code"
            for fault in ("kill -9", "os._exit", "segfault"):
                cases.append(Case(fault, backend, UPDATE, died, rank))
            raised = "KeyError" if backend == "alone" else f"raised on rank {rank} "
            cases.append(Case("exception", backend, UPDATE, raised, rank))
            if backend != "alone":  # nothing watches a process alone but its shell
                cases.append(Case("SIGSTOP", backend, UPDATE, stuck, rank))
                cases.append(Case("kill -9", backend, ROLLOUT, died, rank))

    gone = r"launcher \(torchrun\)"
    cases.append(Case("kill -9", "torchrun", "start-up", gone, victim="torch.distributed.run"))
    cases.append(Case("kill -9", "torchrun", "a step", gone, victim="torch.distributed.run"))
    cases.append(Case("kill -9", "ray", "a step", r"GCS, ", victim="gcs_server"))
    cases.append(Case("kill -9", "ray", "a step", r"raylet|node", victim="raylet/raylet"))

    return cases


class Run:
    """The processes of a case, and the lines that they print with the time of each."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))
        self.fault_file = self.folder / "fault"
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            self._command(),
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _command(self) -> list[str]:
        launcher = [sys.executable]
        more = [f"trainer.default_local_dir={self.folder / 'run'}"]
        if self.case.backend == "torchrun":
            launcher += ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
        if self.case.backend == "ray":
            more += ["trainer.n_gpus_per_node=2", "ray_init.address=local"]
        return [*launcher, "-m", "verl.trainer.main_ppo", *TRAINING, *more]

    def _environment(self) -> dict[str, str]:
        fault = {} if self.case.victim else {"FAULT_METHOD": self.case.phase}
        return {
            **os.environ,
            **fault,
            MARK: self.mark,
            "FAULT_KIND": self.case.fault,
            "FAULT_RANK": str(self.case.rank),
            "FAULT_FILE": str(self.fault_file),
            "OMP_NUM_THREADS": "1",
        }

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip()))

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the case that are alive, wherever they are in the tree."""
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get(MARK) == self.mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:  # of another user, or gone meanwhile
                continue
        return found

    def fault_time(self) -> float:
        """Wait for the fault; cause it where its victim is not a rank."""
        gives_up_at = time.time() + START_S
        while time.time() < gives_up_at and self.process.poll() is None:
            if self.fault_file.exists() and self.fault_file.read_text():
                return float(self.fault_file.read_text())
            if self.case.victim and self._is_in_phase():
                return self._kill_victim()
            time.sleep(0.2)
        if self.fault_file.exists():
            return float(self.fault_file.read_text())
        raise RuntimeError(f"{self.case} did not come to its fault: {self.lines[-5:]}")

    def _is_in_phase(self) -> bool:
        if self.case.phase == "start-up":  # the ranks have begun to import
            return len(self.processes()) >= 3
        return any("[Step 2/" in line for _, line in self.lines)

    def _kill_victim(self) -> float:
        for process in self.processes():
            if self.case.victim in " ".join(process.cmdline()[:4]):
                now = time.time()
                process.send_signal(signal.SIGKILL)
                return now
        raise RuntimeError(f"{self.case.victim} does not run")

    def first_error(self, since: float) -> tuple[float, str] | None:
        """Return the time and the line of the first error after the fault."""
        for when, line in self.lines:
            if when >= since - 0.5 and ERROR.search(line):
                return when, line
        if self.case.backend == "alone" and self.process.poll() not in (None, 0):
            return time.time(), f"exit code {self.process.returncode}"
        return None

    def clean_up(self) -> None:
        """Kill the processes that are left, and remove the folder."""
        for process in self.processes():
            process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def outcome_of(case: Case) -> Outcome:
    """Run one case to its end."""
    run = Run(case)
    try:
        since = run.fault_time()
        found = None
        while found is None and time.time() < since + GIVE_UP_S:
            time.sleep(0.2)
            found = run.first_error(since)
        if found is None:
            left = [" ".join(process.cmdline())[:60] for process in run.processes()]
            return Outcome(None, run.lines[-1][1] if run.lines else "", False, left)

        when, line = found
        while run.processes() and time.time() < when + LEFT_S:
            time.sleep(0.5)
        left = [" ".join(process.cmdline())[:60] for process in run.processes()]
        return Outcome(when - since, line, bool(re.search(case.names, line)), left)
    finally:
        run.clean_up()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="of a case: fault, rank, backend, phase")
    words = parser.parse_args().words
    cases = [case for case in all_cases() if all(word in str(case) for word in words)]
    if not cases:
        known = "\n".join(map(str, all_cases()))
        parser.error(f"no case contains all of {words}. The cases are:\n{known}")

    print("| fault | backend | phase | error after | named first | left after 30 s |")
    print("|---|---|---|---|---|---|", flush=True)
    failed = 0

    for case in cases:
        outcome = outcome_of(case)
        noticed = outcome.seconds is not None and outcome.seconds <= DEADLINE_S
        failed += not (noticed and outcome.rightly_named and not outcome.left)
        who = case.victim or f"rank {case.rank}"
        seconds = "never" if outcome.seconds is None else f"{outcome.seconds:.1f} s"
        named = "yes" if outcome.rightly_named else f"no: {outcome.first_line[:160]}"
        left = "; ".join(outcome.left) or "none"
        cells = (f"{case.fault} of {who}", case.backend, case.phase, seconds, named, left)
        print(f"| {' | '.join(cells)} |", flush=True)

    print(f"{len(cases) - failed} of {len(cases)} as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
