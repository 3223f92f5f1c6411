"""The helper process that runs code: one JSON line in, one out, and a fork of its own for every
run.

It is started clean, knows nothing of the trainer's memory, files or environment, and imports
nothing but the standard library. A run's process ends with the run. Started by `runner`, as `python
-I -c ... <settings as JSON>`.
"""

import gc
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
import types
from typing import Any

from verl.rewards.sandbox import isolation, seccomp

# What a run may write into one file, standard output included, and how much of its errors is told.
FILE_BYTES = 16 * 2**20
ERROR_CHARACTERS = 2000
OPEN_FILES = 64
_REPORT = 3  # file descriptor that a run reports on
_REPORT_BYTES = 1 << 16


def main() -> None:
    """Serve until standard input closes. The first line out is "ready" with what holds, or why we
    cannot serve."""
    settings = json.loads(sys.argv[1])
    sys.path = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    try:
        if settings["isolation"] == "namespaces":
            isolation.enter()
    except OSError as error:
        _send(answers, {"error": str(error)})
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # a fork copies pages that are written to, and the collector writes
    _send(answers, {"ready": True})
    with os.fdopen(requests, encoding="utf-8") as lines:
        for line in lines:
            _send(answers, _serve(json.loads(line), settings, requests))


def _send(stream: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(stream, data) :]


def _serve(request: dict[str, Any], settings: dict[str, Any], parent: int) -> dict[str, Any]:
    """Fork, run, wait, clean up: what became of one run."""
    own_files = settings["isolation"] == "namespaces"
    if own_files:
        isolation.mount_scratch()
    output, errors, report = os.memfd_create("output"), os.memfd_create("errors"), os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _become_the_run(request, settings, (output, errors, report[1]))
    os.close(report[1])
    told, status = _wait(child, report[0], parent, began + settings["timeout_s"])
    seconds = time.monotonic() - began
    tail = _tail(errors)
    text = _read(output)
    for file in (output, errors, report[0]):
        os.close(file)
    if own_files:
        isolation.unmount_scratch()
    finished, passed = _verdicts(told, request["token"])
    if status is None:
        what, tail = "timeout", f"no end within {settings['timeout_s']:g} s"
    elif finished:
        what = "finished"
    else:
        what = "failed"
        code = os.waitstatus_to_exitcode(status)
        tail = tail or (
            f"killed by signal {-code}"
            if code < 0
            else f"left with exit code {code} before its end"
        )
    return {"status": what, "passed": passed, "output": text, "error": tail, "seconds": seconds}


def _wait(child: int, report: int, parent: int, deadline: float) -> tuple[bytes, int | None]:
    """What the run reported, and its wait status; None if it was killed at the deadline."""
    poll = select.poll()
    poll.register(report, select.POLLIN)
    poll.register(parent, 0)  # hang-up alone: whoever started us is gone
    told, is_open = b"", True
    while True:
        left = deadline - time.monotonic()
        # A run may close its report and go on; then there is nothing to wait for but its end.
        events = dict(poll.poll(max(min(left, left if is_open else 0.002) * 1000, 0)))
        if events.get(report):
            chunk = os.read(report, 4096)
            told += chunk
            if not chunk or len(told) > _REPORT_BYTES:
                poll.unregister(report)
                is_open = False
        ended, status = os.waitpid(child, os.WNOHANG) if not is_open else (0, 0)
        if ended:
            return told, status
        if left <= 0 or events.get(parent):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if events.get(parent):
                os._exit(0)
            return told, None


def _verdicts(told: bytes, token: str) -> tuple[bool, list[bool]]:
    """Whether the run came to its end, and which tests passed. Without the token a line counts for
    nothing."""
    lines = [
        line[len(token) :]
        for line in told.decode("ascii", "replace").split("\n")
        if line.startswith(token)
    ]
    return "end" in lines, [line == "passed" for line in lines if line in ("passed", "failed")]


def _read(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    return os.read(file, FILE_BYTES).decode("utf-8", "replace")


def _tail(file: int) -> str:
    size = os.fstat(file).st_size
    os.lseek(file, max(size - 4 * ERROR_CHARACTERS, 0), os.SEEK_SET)
    return (
        os.read(file, 4 * ERROR_CHARACTERS).decode("utf-8", "replace")[-ERROR_CHARACTERS:].strip()
    )


def _become_the_run(
    request: dict[str, Any], settings: dict[str, Any], files: tuple[int, int, int]
) -> None:
    """In the child: lock every door, then run. Never returns."""
    try:
        output, errors, report = files
        given = os.memfd_create("input")
        os.write(given, request["input"].encode("utf-8", "replace"))
        os.lseek(given, 0, os.SEEK_SET)
        for number, file in enumerate((given, output, errors)):
            os.dup2(file, number)
        if report != _REPORT:
            os.dup2(report, _REPORT)
        os.closerange(_REPORT + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        _lock(settings)
        _run(request)
    except BaseException:  # noqa: BLE001  (our own mistakes before the run; told like its own)
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(1)


def _lock(settings: dict[str, Any]) -> None:
    seconds = int(settings["timeout_s"]) + 1
    for limit, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, settings["memory_limit_mb"] * 2**20),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if settings["isolation"] == "none":
        return
    isolation.die_with_parent()
    isolation.drop_capabilities()
    own_files = settings["isolation"] == "namespaces"
    os.chdir(isolation.SCRATCH if own_files else "/")
    seccomp.install(deny_writes=not own_files)


def _run(request: dict[str, Any]) -> None:
    """The program, then its tests one by one, each reported as it ends; whatever it did to Python's
    own modules."""
    write, leave, token = os.write, os._exit, request["token"].encode()
    run, compiled = exec, compile  # a program may replace the builtins
    tests: list[str] = request["tests"]
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(number, mode, encoding="utf-8", errors="replace", closefd=False)
        for number, mode in enumerate("rww")
    )
    flush = (sys.stdout.flush, sys.stderr.flush)
    # A module of its own: dataclasses and pickle look it up by name.
    module = types.ModuleType("__main__" if request["is_script"] else "solution")
    for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
        del sys.modules[name]
    sys.modules[module.__name__] = module
    sys.argv = ["program.py"]
    complain = traceback.print_exc
    try:
        run(compiled(request["code"], "program.py", "exec"), module.__dict__)
    except SystemExit as error:
        if error.code not in (None, 0) or not request["is_script"]:
            raise
    for test in tests:
        try:
            run(compiled(test, "test.py", "exec"), module.__dict__)
            write(_REPORT, token + b"passed\n")
        except BaseException:  # noqa: BLE001  (a test may raise anything)
            write(_REPORT, token + b"failed\n")
            complain()
    for stream in flush:
        stream()
    write(_REPORT, token + b"end\n")
    leave(0)
