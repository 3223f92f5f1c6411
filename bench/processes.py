"""Run benchmarks, and the sides that they compare, in processes of their own. Imports no torch."""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

# Marks of an error line in a log; warnings and progress stand above it, CUDA's advice below.
_ERROR_MARKS = ("Error", "Exception", "SystemExit")
_LAUNCHER = "ChildFailedError"  # torchrun's own error, below the one of the rank that failed
_LINE = 300
_END_S = 40.0  # after SIGTERM; torchrun gives its ranks 30 s


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """The work of one side: plain values, which its process reads from a file."""

    def write(self, path: Path) -> None:
        """Write the values as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Self":
        """Return the job of a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def run_side(
    script: str,
    job: JobFile,
    folder: Path,
    name: str,
    *,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any] | str:
    """Run a script of this folder on a job; see `side_arguments`.

    Job, result and log are NAME.job.json, NAME.json and NAME.log in `folder`.

    Returns:
        The result, or one line that says why there is none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job_file = folder / f"{name}.job.json"
    result_file = folder / f"{name}.json"
    job.write(job_file)
    result_file.unlink(missing_ok=True)

    path = Path(__file__).with_name(script)
    command = [str(path), "--job", str(job_file), "--json", str(result_file)]
    problem = run_python(command, folder / f"{name}.log", limit_s=limit_s, environment=environment)
    return problem or json.loads(result_file.read_text(encoding="utf-8"))


def side_arguments(description: str | None) -> argparse.Namespace:
    """Return the arguments of a side's process: a file with its job, and a file for its result."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", type=Path, required=True, help="file that the benchmark wrote")
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    return parser.parse_args()


def require_python(
    arguments: Sequence[str],
    *,
    num_threads: int = 1,
    environment: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> None:
    """Run Python as `run_python` does, for a benchmark that cannot go on without the result.

    The log is a temporary file, which stays if the run fails. SystemExit then names it.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    variables = {"OMP_NUM_THREADS": str(num_threads), **(environment or {})}
    problem = run_python(arguments, folder / "log", limit_s=limit_s, environment=variables)
    if problem:
        raise SystemExit(f"{' '.join(arguments)}: {problem}")
    shutil.rmtree(folder)


def run_python(
    arguments: Sequence[str],
    log: Path,
    *,
    limit_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> str | None:
    """Run Python with its output in `log`. Return None, or one line that says why it failed.

    At the limit, or when this process is interrupted, the process and all that it started are
    ended: by SIGTERM, so that a launcher can end the ranks that it put in sessions of their own,
    then by SIGKILL.

    Args:
        arguments: a script or a module, and its own arguments.
        log: file for both streams; its folder is made.
        limit_s: seconds that it may take; None: no limit.
        environment: on top of this process's own.
        python: another interpreter.
    """
    start = time.perf_counter()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [python, *arguments],
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
        except BaseException:
            # A session of its own: the terminal's Ctrl-C has not reached it.
            _end(process)
            raise

    return None if code == 0 else f"{last_error(log)} (code {code}, log: {log})"


def _end(process: subprocess.Popen) -> None:
    """End a process and its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_error(log: Path) -> str:
    """Return the line of a log that names the error, cut to two lines of a terminal or so."""
    lines = ["no output"]
    errors = []
    for text in log.read_text(encoding="utf-8", errors="replace").splitlines():
        line = text.strip()
        if not line or _LAUNCHER in line:
            continue
        lines.append(line)
        start = line.split(":")[0]
        if any(mark in start for mark in _ERROR_MARKS):
            errors.append(line)
    return (errors or lines)[-1][:_LINE]
