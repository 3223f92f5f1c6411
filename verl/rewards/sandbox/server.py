"""The helper process that runs code: one JSON line in, one JSON line out, one fork per run.

`runner` starts it as `python -I -c ... <settings as JSON>`. It has no access to the trainer's
memory, files or environment, and imports only the standard library. A run's process ends with the
run.
"""

import gc
import json
import os
import platform
import resource
import select
import signal
import sys
import time
import traceback
import types
from typing import Any, NamedTuple

from verl.rewards.sandbox import isolation, landlock, seccomp
from verl.rewards.sandbox.threads import MAX_THREADS, ThreadLimit
from verl.utils.children import take_connection

FILE_BYTES = 16 * 2**20  # limit of each file that a run writes, including its standard output
ERROR_CHARACTERS = 2000  # limit of the part of a run's errors that is reported
OPEN_FILES = 64
_REPORT = 3  # file descriptor on which a run reports
_REPORT_BYTES = 1 << 16


class _Confinement(NamedTuple):
    """The means by which the server confines its programs."""

    isolation: str
    scratch: str | None = None  # folder in which every program has a file system of its own
    ruleset: int | None = None  # of Landlock, if a program shares the user's file system
    threads: ThreadLimit | None = None


def main() -> None:
    """Serve until the parent closes the connection, which standard input is.

    The first line sent is "ready" with the remaining gaps, or the error that prevents service.
    """
    settings = json.loads(sys.argv[1])
    sys.path = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    connection = take_connection()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    try:
        confinement = _prepare(settings["isolation"])
    except OSError as error:
        _send(connection, {"error": str(error)})
        return

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # the collector writes to pages, which a fork would then have to copy
    _send(connection, {"ready": True, "gaps": _gaps(confinement)})

    with os.fdopen(connection, encoding="utf-8") as lines:
        for line in lines:
            _send(connection, _serve(json.loads(line), settings, confinement, connection))


def _prepare(isolation_name: str) -> _Confinement:
    if isolation_name == "none":
        return _Confinement(isolation_name)

    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)  # gone after `enter`
    scratch = ruleset = None
    if isolation_name == "namespaces":
        scratch = isolation.enter()
    else:
        ruleset = landlock.readable(isolation.readable_paths())
    seccomp.prepare(platform.machine(), scratch is None)  # once, before all forks
    return _Confinement(isolation_name, scratch, ruleset, ThreadLimit(proc))


def _gaps(confinement: _Confinement) -> list[str]:
    """List the protections that this kernel does not offer."""
    gaps = []
    if confinement.isolation == "seccomp" and confinement.ruleset is None:
        gaps.append(
            "this kernel has no Landlock (Linux 5.13), so a program can read the files that this "
            "user may read, and the environment and memory of this user's processes"
        )
    if confinement.threads is not None and confinement.threads.listener is None:
        gaps.append(
            f"a program with more than {MAX_THREADS} threads is killed some milliseconds later "
            f"instead of kept from starting them ({confinement.threads.reason})"
        )
    return gaps


def _send(stream: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(stream, data) :]


def _serve(
    request: dict[str, Any], settings: dict[str, Any], confinement: _Confinement, parent: int
) -> dict[str, Any]:
    """Fork, run the program, wait, clean up, and return the outcome."""
    if confinement.scratch is not None:
        isolation.mount_scratch(confinement.scratch)
    output = os.memfd_create("output")
    errors = os.memfd_create("errors")
    report = os.pipe()

    began = time.monotonic()
    server = os.getpid()
    child = os.fork()
    if child == 0:
        _become_the_run(request, settings, confinement, server, (output, errors, report[1]))
    os.close(report[1])
    deadline = began + settings["timeout_s"]
    reported, status, why = _wait(child, report[0], parent, deadline, confinement.threads)
    seconds = time.monotonic() - began

    tail = _tail(errors)
    text = _read(output)
    for file in (output, errors, report[0]):
        os.close(file)
    if confinement.scratch is not None:
        isolation.unmount_scratch(confinement.scratch)

    finished, passed = _verdicts(reported, request["token"])
    outcome = "failed"
    if why == "timeout":
        outcome = "timeout"
        tail = f"no end within {settings['timeout_s']:g} s"
    elif why:
        tail = why
    elif finished:
        outcome = "finished"
    elif not tail:
        tail = _described_end(status)
    return {"status": outcome, "passed": passed, "output": text, "error": tail, "seconds": seconds}


def _described_end(status: int) -> str:
    """Describe a wait status of a run that ended too early."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"killed by signal {-code}"
    return f"left with exit code {code} before its end"


def _wait(
    child: int, report: int, parent: int, deadline: float, threads: ThreadLimit | None
) -> tuple[bytes, int, str]:
    """Return the run's report, its wait status, and the reason if it was killed, else ""."""
    poll = select.poll()
    poll.register(report, select.POLLIN)
    poll.register(parent, 0)  # reports only a hang-up: our parent is gone
    listener = threads.listener if threads is not None else None
    if listener is not None:
        poll.register(listener, select.POLLIN)
    must_watch = threads is not None and listener is None
    reported = b""
    is_open = True

    while True:
        left = deadline - time.monotonic()
        # A run may close its report and continue; then only its end can be waited for.
        pause = min(left, 0.002) if must_watch or not is_open else left
        events = dict(poll.poll(max(pause * 1000, 0)))
        if threads is not None and listener is not None and events.get(listener):
            threads.answer(child)
        if events.get(report):
            chunk = os.read(report, 4096)
            reported += chunk
            if not chunk or len(reported) > _REPORT_BYTES:
                poll.unregister(report)
                is_open = False

        ended, status = os.waitpid(child, os.WNOHANG) if not is_open else (0, 0)
        if ended:
            return reported, status, ""
        too_many = must_watch and threads is not None and threads.is_exceeded(child)
        if left <= 0 or too_many or events.get(parent):
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
            if events.get(parent):
                os._exit(0)
            why = "timeout" if left <= 0 else f"more than {MAX_THREADS} threads"
            return reported, status, why


def _verdicts(reported: bytes, token: str) -> tuple[bool, list[bool]]:
    """Return whether the run came to its end, and which tests passed. Ignore other lines."""
    finished = False
    passed: list[bool] = []
    for line in reported.decode("ascii", "replace").split("\n"):
        if not line.startswith(token):
            continue
        verdict = line[len(token) :]
        if verdict == "end":
            finished = True
        elif verdict in ("passed", "failed"):
            passed.append(verdict == "passed")
    return finished, passed


def _read(file: int) -> str:
    os.lseek(file, 0, os.SEEK_SET)
    return os.read(file, FILE_BYTES).decode("utf-8", "replace")


def _tail(file: int) -> str:
    most_bytes = 4 * ERROR_CHARACTERS  # a character of UTF-8 has up to 4 bytes
    size = os.fstat(file).st_size
    os.lseek(file, max(size - most_bytes, 0), os.SEEK_SET)
    text = os.read(file, most_bytes).decode("utf-8", "replace")
    return text[-ERROR_CHARACTERS:].strip()


def _become_the_run(
    request: dict[str, Any],
    settings: dict[str, Any],
    confinement: _Confinement,
    server: int,
    files: tuple[int, int, int],
) -> None:
    """Restrict the child process, then run the program in it. Never returns."""
    try:
        output, errors, report = files
        given = os.memfd_create("input")
        os.write(given, request["input"].encode("utf-8", "replace"))
        os.lseek(given, 0, os.SEEK_SET)
        for number, file in enumerate((given, output, errors)):
            os.dup2(file, number)
        if report != _REPORT:
            os.dup2(report, _REPORT)
        if confinement.isolation != "none":
            _lock(confinement, server)

        os.closerange(_REPORT + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        _limit(settings)
        if confinement.isolation != "none":
            seccomp.install(deny_writes=confinement.scratch is None)
        _run(request)
    except BaseException:  # noqa: BLE001  (our own failures are reported like those of the run)
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(1)


def _lock(confinement: _Confinement, server: int) -> None:
    """Drop every right; `seccomp.install` then restricts the system calls."""
    isolation.die_with_parent()
    if os.getppid() != server:
        os._exit(1)  # the server died before `die_with_parent`
    isolation.drop_capabilities()
    isolation.forbid_dumps()
    if confinement.scratch is None:
        os.chdir("/")
    else:
        os.chdir(confinement.scratch)
        os.environ.update(HOME=confinement.scratch, TMPDIR=confinement.scratch)
    if confinement.ruleset is not None:
        landlock.confine(confinement.ruleset)


def _limit(settings: dict[str, Any]) -> None:
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


def _run(request: dict[str, Any]) -> None:
    """Run the program, then its tests one by one, and report each as it ends."""
    # Keep references: a program may replace builtins and attributes of Python's modules.
    write = os.write
    leave = os._exit
    run = exec
    compiled = compile
    complain = traceback.print_exc

    token = request["token"].encode()
    tests: list[str] = request["tests"]
    options: dict[str, Any] = {"encoding": "utf-8", "errors": "replace", "closefd": False}
    sys.stdin = os.fdopen(0, "r", **options)
    sys.stdout = os.fdopen(1, "w", **options)
    sys.stderr = os.fdopen(2, "w", **options)
    flush = (sys.stdout.flush, sys.stderr.flush)

    # The program gets a module of its own: dataclasses and pickle look it up by name.
    module = types.ModuleType("__main__" if request["is_script"] else "solution")
    for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
        del sys.modules[name]
    sys.modules[module.__name__] = module
    sys.argv = ["program.py"]

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
