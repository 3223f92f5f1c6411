"""Running the sides of `training.py` and `step.py`: each in its own process, with a time limit.
Imports no torch."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# What an error line of a log looks like; warnings and progress stand above it, CUDA's advice below.
_ERROR_MARKS = ("Error", "Exception", "SystemExit")
_LINE = 300


def run_limited(
    command: Sequence[str], log: Path, *, limit_s: float, environment: dict[str, str] | None = None
) -> str | None:
    """Run a script of ours with its output in `log`; None, or in one line why it gave no result.

    At the limit the process and all that it started are killed.
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
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"not done after {time.perf_counter() - start:.0f} s, killed; log: {log}"

    return None if code == 0 else f"{last_error(log)} (code {code}, log: {log})"


def last_error(log: Path) -> str:
    """The line that says what went wrong, cut to a line of the terminal or two."""
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    named = [line for line in lines if any(mark in line.split(":")[0] for mark in _ERROR_MARKS)]
    return (named or lines or ["no output"])[-1][:_LINE]
