"""Untrusted programs: allowed actions, the handling of violations, and speed."""

import json
import logging
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from tests.rewards import hostile_programs
from verl.config.reward import SandboxConfig
from verl.rewards.helper import START_TIMEOUT_S, Helper, HelperTimeout
from verl.rewards.sandbox import runner as runner_module
from verl.rewards.sandbox import seccomp
from verl.rewards.sandbox.runner import LocalRunner, choose_isolation
from verl.utils.children import PACKAGE_ROOT
from verl.utils.errors import ConfigError, RewardError

pytestmark = pytest.mark.skipif(
    not seccomp.is_supported(), reason="needs Linux on x86-64 or AArch64"
)


@pytest.fixture(scope="module", params=["namespaces", "seccomp"])
def sandbox(request):
    # Longer than any program takes on a busy machine; those that never end get `short`.
    runner = LocalRunner(
        SandboxConfig(isolation=request.param, timeout_s=60.0, memory_limit_mb=512)
    )
    try:
        runner.run("", [])
    except ConfigError as error:
        pytest.skip(f"this machine does not allow it: {error}")
    yield runner
    runner.close()


def test_a_program_and_its_tests(sandbox):
    run = sandbox.run(
        "def twice(x):\n    return 2 * x",
        ["assert twice(2) == 4", "assert twice(2) == 5", "twice(1)"],
    )
    assert (run.status, run.passed) == ("finished", [True, False, True])
    assert "AssertionError" in run.error


@pytest.mark.parametrize("name", ["exec", "compile"])
def test_a_program_that_replaces_builtins_does_not_pass(sandbox, name):
    cheat = f"import builtins\nbuiltins.{name} = lambda *a, **k: ''\ndef f(x): return 0"
    assert sandbox.run(cheat, ["assert f(2) == 4"]).passed == [False]


def test_a_script_reads_and_prints(sandbox):
    run = sandbox.run("a, b = map(int, input().split())\nprint(a + b)", [], stdin="3 4\n")
    assert (run.status, run.output) == ("finished", "7\n")
    assert sandbox.run("print(1)\nexit()", [], stdin="").status == "finished"
    assert sandbox.run("print(1)\nexit(3)", [], stdin="").status == "failed"
    main = "def main():\n    print('ran')\nif __name__ == '__main__':\n    main()"
    assert sandbox.run(main, [], stdin="").output == "ran\n"
    assert sandbox.run(main, ["pass"]).output == "", "a function's tests do not run its script"


def test_ordinary_python_works(sandbox):
    code = """
        from __future__ import annotations
        import asyncio, collections, dataclasses, json, math, pickle, re, threading
        import numpy as np

        @dataclasses.dataclass
        class Point:
            x: int

        async def wait():
            await asyncio.sleep(0)
            return 5

        results = []
        thread = threading.Thread(target=results.append, args=(1,))
        thread.start()
        thread.join()
    """
    tests = [
        "assert results == [1]",
        "assert asyncio.run(wait()) == 5",
        "assert np.arange(4).sum() == 6",
        "assert pickle.loads(pickle.dumps(Point(3))).x == 3",
    ]
    run = sandbox.run(textwrap.dedent(code), tests)
    assert run.passed == [True] * 4, run.error


# Action of a program, and part of its error; None for a program that only the time limit ends.
HOSTILE = {
    "fork bomb": ("import os\nwhile True:\n    os.fork()", "Error"),
    "patient fork bomb": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        None,
    ),
    "infinite loop": ("while True:\n    pass", None),
    "loop that catches all": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        None,
    ),
    "sleep": ("import time\ntime.sleep(1000)", None),
    "ten gigabytes": ("x = bytearray(10 * 2**30)", "MemoryError"),
    "gigabytes bit by bit": ("x = []\nwhile True:\n    x.append(bytearray(2**24))", "MemoryError"),
    "writes /etc/passwd": ("open('/etc/passwd', 'a').write('x')", "Error"),
    "writes next to Python": (
        "import os\nopen(os.path.dirname(os.__file__) + '/evil.py', 'w')",
        "Error",
    ),
    "writes home": ("import os\nopen('/root/evil', 'w')", "Error"),
    "deletes": ("import os\nos.remove('/usr/bin/env')", "Error"),
    "socket": ("import socket\nsocket.create_connection(('127.0.0.1', 22))", "PermissionError"),
    "unix socket": ("import socket\nsocket.socket(socket.AF_UNIX)", "PermissionError"),
    "name look-up": ("import socket\nsocket.getaddrinfo('example.com', 80)", "gaierror"),
    "output flood": ("while True:\n    print('x' * 100000)", "File too large"),
    "error flood": ("import sys\nwhile True:\n    sys.stderr.write('x' * 100000)", ""),
    "report flood": ("import os\nwhile True:\n    os.write(3, b'x' * 4096)", None),
    "leaves with 0": ("import os\nos._exit(0)", "exit code 0 before its end"),
    "exits": ("raise SystemExit(0)", ""),
    "closes its report": ("import os\nos.close(3)\nwhile True:\n    pass", None),
    "kills its parent": (
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "PermissionError",
    ),
    "kills everybody": ("import os, signal\nos.kill(-1, signal.SIGKILL)", "PermissionError"),
    "kills its group": ("import os, signal\nos.killpg(0, signal.SIGKILL)", "PermissionError"),
    "kills itself": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "killed by signal 9",
    ),
    "segmentation fault": ("import ctypes\nctypes.string_at(0)", "killed by signal 11"),
    "program": ("import subprocess\nsubprocess.run(['id'])", "Error"),
    "replaces itself": ("import os\nos.execv('/usr/bin/env', ['env'])", "PermissionError"),
    "claims success": ("import os\nos.write(3, b'passed\\nend\\n')\nos._exit(0)", "before its end"),
    "raises its limits": ("import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))", "Error"),
    "new namespace": (
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
        "AssertionError",
    ),
    "shared memory": (
        "import ctypes\nassert ctypes.CDLL(None).shmget(1, 4096, 0o1666) >= 0",
        "AssertionError",
    ),
    "no Python": ("def f(:", "SyntaxError"),
    "null byte": ("x = '\0'", "Error"),
    "lone surrogate": ("x = '\ud800'", "Error"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_only_hostile_programs_fail(sandbox, name, tmp_path):
    code, message = HOSTILE[name]
    if message is None:
        sandbox = short(sandbox)
    passwd = Path("/etc/passwd").read_bytes()
    run = sandbox.run(code, ["pass"])
    assert run.status == ("timeout" if message is None else "failed"), run
    assert run.passed == []
    assert (message or "") in run.error
    assert len(run.error) <= 2000
    assert len(run.output) <= 16 * 2**20
    assert Path("/etc/passwd").read_bytes() == passwd
    assert sandbox.run("", ["assert 1 + 1 == 2"]).passed == [True], "the sandbox serves on"


_short: dict[str, LocalRunner] = {}


def short(sandbox: LocalRunner) -> LocalRunner:
    """Return the same sandbox with a limit of a third of a second."""
    isolation = sandbox.settings.isolation
    if isolation not in _short:
        _short[isolation] = LocalRunner(SandboxConfig(isolation=isolation, timeout_s=0.3))
    return _short[isolation]


def test_tests_before_the_one_that_hangs_count(sandbox):
    run = short(sandbox).run("", ["pass", "assert False", "while True: pass", "pass"])
    assert (run.status, run.passed) == ("timeout", [True, False])


def test_the_environment_that_a_program_sees(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    server = LocalRunner(sandbox.settings)
    code = f"""
import os, sys
print(sorted(os.environ))
print([name for name in sys.modules if name.split(".")[0] == "verl"])
print(os.path.exists({str(Path(__file__).parents[2] / "tests")!r}))
"""

    run = server.run(code, [], stdin="")
    server.close()
    assert "SECRET_TOKEN" not in run.output
    assert "[]" in run.output, "nothing of ours is in its memory's modules"
    assert run.output.rstrip().endswith("False") or sandbox.settings.isolation == "seccomp", (
        "nor on its disk"
    )


def test_files_belong_to_one_run_and_are_removed_after_it(sandbox):
    if sandbox.settings.isolation == "seccomp":
        assert "PermissionError" in sandbox.run("open('file', 'w')", []).error
        return
    write = "open('file', 'w').write('x' * 100)\nassert open('file').read() == 'x' * 100"
    assert sandbox.run(write, ["pass"]).passed == [True]
    assert sandbox.run("import os", ["assert os.listdir('.') == []"]).passed == [True]
    big = "for i in range(100):\n    open(f'{i}', 'w').write('x' * 2**20)"
    assert "No space left" in sandbox.run(big, []).error
    assert (
        "No space left"
        in sandbox.run("for i in range(1000):\n    open(f'{i}', 'w').close()", []).error
    )


def test_no_process_or_file_is_left_behind(sandbox):
    runner = LocalRunner(sandbox.settings)
    runner.run("", [])
    helper = runner._pool._borrow()
    processes = family(helper._process.pid)
    assert helper._process.pid in processes
    helper.close()
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in processes) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(is_running(pid) for pid in processes)


def test_it_ends_with_a_trainer_killed_during_a_run(sandbox):
    code = textwrap.dedent(
        f"""
        import threading, time
        from verl.config.reward import SandboxConfig
        from verl.rewards.sandbox.runner import LocalRunner
        runner = LocalRunner(SandboxConfig(isolation={sandbox.settings.isolation!r}, timeout_s=600))
        runner.run("", [])
        print("idle", flush=True)
        input()
        threading.Thread(target=runner.run, args=("while True: pass", []), daemon=True).start()
        time.sleep(600)
        """
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None

    assert trainer.stdout.readline() == "idle\n"
    idle = family(trainer.pid)
    print(file=trainer.stdin, flush=True)
    while len(processes := family(trainer.pid)) <= len(idle):  # until the run is there
        time.sleep(0.01)
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in processes) and time.monotonic() < deadline:
        time.sleep(0.02)

    assert not any(is_running(pid) for pid in processes)


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_dead_server_is_replaced(sandbox):
    helper = sandbox._pool._borrow()
    sandbox._pool._idle.append(helper)
    helper._process.kill()
    assert sandbox.run("", ["pass"]).passed == [True]


def test_a_silent_server_is_an_error(monkeypatch):
    runner = LocalRunner(SandboxConfig())
    runner._isolation = "seccomp"

    def late(message, timeout_s):
        raise HelperTimeout("late")

    monkeypatch.setattr(runner._pool, "ask", late)
    with pytest.raises(RewardError, match="failed twice"):
        runner.run("", [])


def test_several_threads_run_in_parallel(sandbox, monkeypatch):
    count = 3
    at_work: set[int] = set()  # threads that have a helper
    all_at_work = threading.Event()  # never set if runs wait for each other
    borrow = sandbox._pool._borrow

    def borrow_at_once():
        helper = borrow()
        at_work.add(threading.get_ident())
        if len(at_work) == count:
            all_at_work.set()
        # A run that is repeated, because its helper was late, does not wait again.
        assert all_at_work.wait(count * START_TIMEOUT_S), f"only {len(at_work)} runs at once"
        return helper

    monkeypatch.setattr(sandbox._pool, "_borrow", borrow_at_once)
    with ThreadPoolExecutor(count) as threads:
        runs = list(threads.map(lambda _: sandbox.run("", ["pass"]), range(count)))
    assert [run.status for run in runs] == ["finished"] * count


def test_without_isolation_no_program_runs_unless_requested(monkeypatch):
    monkeypatch.setattr(seccomp, "is_supported", lambda: False)
    with pytest.raises(ConfigError, match=r"(?s)cannot be isolated.*isolation=none"):
        choose_isolation(SandboxConfig())
    assert choose_isolation(SandboxConfig(isolation="none")) == "none"


def test_a_short_deadline_of_programs_is_not_that_of_the_check():
    """A machine that is busy for a moment has no weaker isolation, and none is not refused."""
    settings = SandboxConfig(isolation="seccomp", timeout_s=1e-6)
    assert choose_isolation(settings) == "seccomp"


def test_an_isolation_that_fails_its_check_is_not_used(monkeypatch):
    monkeypatch.setitem(runner_module._BREAK_OUTS, "arithmetic", "raise SystemExit")
    with pytest.raises(ConfigError, match="does not prevent arithmetic"):
        choose_isolation(SandboxConfig(isolation="seccomp"))


def test_the_isolation_is_logged_once(caplog):
    runner = LocalRunner(SandboxConfig(isolation="seccomp"))
    with caplog.at_level("INFO", logger="verl"):
        runner.run("", [])
        runner.run("", [])
    runner.close()
    lines = [
        record.getMessage()
        for record in caplog.records
        if "Sandbox for code" in record.getMessage()
    ]
    assert len(lines) == 1
    assert "seccomp. It ensures: no network" in lines[0]


def test_a_fall_back_from_namespaces_is_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("verl"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("verl"), "disabled", False)
    caplog.set_level(logging.INFO, logger="verl")
    gaps_of = runner_module._gaps_of

    def no_namespaces(isolation, settings):
        if isolation == "namespaces":
            raise runner_module._NotAvailable("forbidden here")
        return gaps_of(isolation, settings)

    monkeypatch.setattr(runner_module, "_gaps_of", no_namespaces)
    assert choose_isolation(SandboxConfig()) == "seccomp"
    (record,) = [one for one in caplog.records if "Sandbox for code" in one.getMessage()]
    assert record.levelname == "WARNING"
    assert "namespaces not available: forbidden here" in record.getMessage()


def test_a_kernel_without_landlock_and_listeners(monkeypatch, caplog):
    """Log both gaps, and limit threads by a watcher instead."""
    monkeypatch.setattr(logging.getLogger("verl"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("verl"), "disabled", False)
    caplog.set_level(logging.INFO, logger="verl")
    start = textwrap.dedent(
        f"""
        import errno, sys
        sys.path.insert(0, {PACKAGE_ROOT!r})
        from verl.rewards.sandbox import landlock, seccomp, server
        def refuse():
            raise OSError(errno.EBUSY, "busy")
        landlock.version = lambda: 0
        seccomp.listen_for_threads = refuse
        server.main()
        """
    )

    def old_kernel(settings, isolation):
        limits = json.dumps({**asdict(settings), "isolation": isolation})
        return Helper([sys.executable, "-I", "-c", start, limits], {}, name="an old kernel")

    monkeypatch.setattr(runner_module, "start_server", old_kernel)
    runner = LocalRunner(SandboxConfig(isolation="seccomp"))
    run = runner.run(hostile_programs.SLEEPING_THREADS, [])
    assert run.status == "failed"
    assert "more than 128 threads" in run.error
    assert runner.run(hostile_programs.HONEST, ["assert len(done) == 4"]).passed == [True]
    runner.close()
    text = caplog.text
    assert "no Landlock" in text
    assert "is killed some milliseconds later" in text


def test_locks_succeed_and_leases_fail(sandbox):
    code = "import fcntl, os\nfile = open(os.__file__)\nfcntl.flock(file, fcntl.LOCK_EX)"
    run = sandbox.run(code, ["fcntl.lockf(file, fcntl.LOCK_SH)", "fcntl.fcntl(file, 1024, 0)"])
    assert run.passed == [True, False], run.error


def test_unprotected_runs_still_have_limits():
    runner = LocalRunner(SandboxConfig(isolation="none", timeout_s=0.5, memory_limit_mb=256))
    assert runner.run("", ["assert True"]).passed == [True]
    assert runner.run("while True: pass", []).status == "timeout"
    assert "MemoryError" in runner.run("bytearray(2**30)", []).error
    runner.close()
