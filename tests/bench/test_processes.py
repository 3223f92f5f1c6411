"""Processes that benchmarks start: their limits, their errors, and their end."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from processes import require_python, run_python


@pytest.mark.parametrize(
    ("source", "limit_s", "message"),
    [
        (
            "import warnings\nprint('x')\nraise ValueError('the reason')",
            60,
            "ValueError: the reason (code 1, log: ",
        ),
        ("raise SystemExit('a word')", 60, "a word (code 1"),
        (
            "print('ValueError: of a rank')\nraise SystemExit('elastic.ChildFailedError: ')",
            60,
            "ValueError: of a rank (code 1",
        ),
        ("import time\ntime.sleep(60)", 0.5, "not done after "),
        ("pass", 60, None),
    ],
)
def test_failing_side_gives_one_line(tmp_path, source, limit_s, message):
    script = tmp_path / "side.py"
    script.write_text(source, encoding="utf-8")
    problem = run_python([str(script)], tmp_path / "logs" / "log", limit_s=limit_s)
    if message is None:
        assert problem is None
    else:
        assert problem is not None
        assert message in problem
        assert "\n" not in problem


def test_run_that_is_required_ends_the_benchmark_with_its_reason(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "import os\nassert os.environ['OMP_NUM_THREADS'] == '2', 'threads'\n"
        "raise SystemExit(os.environ['REASON'])",
        encoding="utf-8",
    )
    with pytest.raises(SystemExit, match=r"run.py: the reason \(code 1, log: (.*)\)") as ended:
        require_python([str(script)], num_threads=2, environment={"REASON": "the reason"})

    log = Path(str(ended.value).rpartition("log: ")[2].rstrip(")"))
    assert log.read_text(encoding="utf-8") == "the reason\n"
    shutil.rmtree(log.parent)


def test_interrupted_run_leaves_no_process_behind(tmp_path, monkeypatch):
    script = tmp_path / "run.py"
    script.write_text("import time\ntime.sleep(60)", encoding="utf-8")
    started = []
    monkeypatch.setattr(subprocess.Popen, "wait", interrupted_once(started))
    with pytest.raises(KeyboardInterrupt):
        run_python([str(script)], tmp_path / "log")

    assert started[0].returncode == -signal.SIGTERM


def interrupted_once(started: list[subprocess.Popen]) -> Callable[..., int]:
    """Return a `Popen.wait` whose first call raises KeyboardInterrupt; `started` gets the process."""
    wait = subprocess.Popen.wait

    def interrupted(process: subprocess.Popen, timeout: float | None = None) -> int:
        if not started:
            started.append(process)
            raise KeyboardInterrupt
        return wait(process, timeout)

    return interrupted
