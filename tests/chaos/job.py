"""A toy training in processes of its own, to which harm is done."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

DEADLINE_S = 20.0  # of a call on the ranks
LIMIT_S = 240.0  # of a run; a hang ends there
STEPS = 6
NUM_RANKS = 2
PROMPTS = 4  # of a step
SAMPLES = 4  # of a prompt
TRAINING = [
    *("data.dataset_name=toy", f"data.train_batch_size={PROMPTS}", "data.max_response_length=8"),
    *(f"actor_rollout_ref.rollout.n={SAMPLES}", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
    *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.num_threads=1"),
    *(f"trainer.max_steps={STEPS}", "trainer.save_freq=1"),
]
RAY = [f"trainer.n_gpus_per_node={NUM_RANKS}", "ray_init.address=local"]
TORCHRUN = ["-m", "torch.distributed.run", f"--nproc_per_node={NUM_RANKS}"]
FULLY_ASYNC = "trainer.mode=fully_async"
STALENESS_0 = [FULLY_ASYNC, "async_training.staleness_threshold=0"]
APART = "trainer.placement.rollout=[1]"
_CALLS = Path(__file__).with_name("always_calls.py")
_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
AGENTS = [
    FULLY_ASYNC,
    *("data.dataset_name=calculator", "data.max_prompt_length=160", "data.max_response_length=160"),
    *(f"actor_rollout_ref.model.external_lib={_CALLS}", f"custom_reward_function.path={_CALLS}"),
    *(f"{_MULTI_TURN}.function_tool_path={_CALLS}", f"{_MULTI_TURN}.format=always_calls"),
    # a model that is not trained has to stop somewhere
    f"actor_rollout_ref.rollout.stop_token_ids={list(range(10, 200))}",
]
BACKENDS: dict[str, tuple[list[str], list[str]]] = {
    "alone": ([], []),
    "torchrun": (TORCHRUN, []),
    "ray": ([], RAY),
    "fully_async": ([], [FULLY_ASYNC]),
    "one_step_off": ([], ["trainer.mode=one_step_off"]),
    "fully_async on two ranks": (TORCHRUN, [FULLY_ASYNC]),
    "one_step_off apart": (TORCHRUN, ["trainer.mode=one_step_off", APART]),
    "staleness 0 apart": (TORCHRUN, [*STALENESS_0, APART]),
    "fully_async apart": (TORCHRUN, [FULLY_ASYNC, APART]),
    "one_step_off apart on Ray": ([], [*RAY, "trainer.mode=one_step_off", APART]),
    "staleness 0 apart on Ray": ([], [*RAY, *STALENESS_0, APART]),
    "fully_async apart on Ray": ([], [*RAY, FULLY_ASYNC, APART]),
    "agents": ([], AGENTS),
    "agents apart": (TORCHRUN, [*AGENTS, APART]),
}
ERROR = re.compile(r"Error|error|Killed|died|gave no sign|not answer|exit code")


class Job:
    """A training in processes of its own, and its output with the time of every line."""

    def __init__(self, backend: str, folder: Path, *keys: str, **environment: str) -> None:
        self.folder = folder
        self.undo: list[Callable[[], None]] = []  # after the end
        self.lines: list[tuple[float, str]] = []
        self.left: list[str] = []  # processes that were still there long after the end
        self.readers: list[threading.Thread] = []
        self.can_report = True  # whether the process that names errors lives
        launcher, more = BACKENDS[backend]
        if launcher:
            launcher = [*launcher, f"--master_port={random.randint(20_000, 40_000)}"]
        replaced = {key.partition("=")[0] for key in more}
        base = [key for key in TRAINING if key.partition("=")[0] not in replaced]
        command = [sys.executable, *launcher, "-m", "verl.trainer.main_ppo", *base, *more]
        self.process = self.start(
            [*command, f"trainer.default_local_dir={folder}", *keys],
            {"OMP_NUM_THREADS": "1", **environment},
        )

    def start(self, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a process, and keep its output with that of the others."""
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        self.readers.append(reader)
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
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
        """Wait for the end; kill all processes after the limit. Returns the exit code."""
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
        for undo in self.undo:
            undo()
        self.undo.clear()
        for reader in self.readers:
            reader.join(5)

    def error_after(self, moment: float) -> float | None:
        """Return the seconds to the first line of an error; None without one."""
        for when, line in self.lines:
            if when >= moment and ERROR.search(line):
                return when - moment
        return None
