"""Running the sides of `training.py` and `step.py`: each in its own process, with a time limit.
Imports no torch."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# What an error line of a log looks like; warnings and progress stand above it, CUDA's advice below.
_ERROR_MARKS = ("Error", "Exception", "SystemExit")
_LAUNCHER = "ChildFailedError"  # torchrun's own error, below the one of the rank that failed
_LINE = 300
_END_S = 40.0  # after SIGTERM; torchrun gives its ranks 30 s


def run_limited(
    command: Sequence[str], log: Path, *, limit_s: float, environment: dict[str, str] | None = None
) -> str | None:
    """Run a script of ours with its output in `log`; None, or in one line why it gave no result.

    At the limit the process and all that it started are ended: by SIGTERM, so that a launcher can
    end the ranks that it put in sessions of their own, then by SIGKILL.
    """
    start = time.perf_counter()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            seconds = time.perf_counter() - start
            _end(process)
            return f"not done after {seconds:.0f} s, killed; log: {log}"

    return None if code == 0 else f"{last_error(log)} (code {code}, log: {log})"


def _end(process: subprocess.Popen) -> None:
    """End a process and its group."""
    os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_error(log: Path) -> str:
    """The line that says what went wrong, cut to a line of the terminal or two."""
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip() and _LAUNCHER not in line
    ]
    named = [line for line in lines if any(mark in line.split(":")[0] for mark in _ERROR_MARKS)]
    return (named or lines or ["no output"])[-1][:_LINE]
