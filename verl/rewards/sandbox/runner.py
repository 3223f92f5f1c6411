"""Run code for rules in the sandbox of this machine. `verl.rewards.remote` has a service for it."""

import functools
import json
import logging
import os
import secrets
import sys
import threading
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from verl.config.reward import SandboxConfig
from verl.rewards.helper import Helper, HelperDied, HelperPool, HelperTimeout
from verl.rewards.sandbox import seccomp
from verl.utils.children import code_to_run
from verl.utils.errors import ConfigError, RewardError
from verl.utils.logging import logger

# Time in addition to a run's own limit, for the fork and the cleanup on a busy machine.
GRACE_S = 30.0
_PROTECTIONS = {
    "namespaces": (
        "no network, no new processes, no signals to others, no access to home, data or "
        "environment, writes only to a temporary folder in memory"
    ),
    "seccomp": (
        "no network, no new processes, no signals to others, no writes to any file, and reads only "
        "of Python and the system's libraries"
    ),
}


@dataclass(slots=True)
class Run:
    """The result of running a program.

    `status` is "finished" (the program and every test ended), "failed" (it raised, exited early or
    was killed) or "timeout". `passed` has one entry for each test that ended. `output` is the text
    that it printed.
    """

    status: str
    passed: list[bool] = field(default_factory=list)
    output: str = ""
    error: str = ""
    seconds: float = 0.0


class CodeRunner(Protocol):
    """Runs untrusted Python programs. Up to `max_concurrent` threads call it at once."""

    max_concurrent: int

    def run(self, code: str, tests: list[str], *, stdin: str | None = None) -> Run:
        """Run `code`, then each test in the same namespace.

        A test is a statement that raises if the code is wrong. With `stdin`, the code is a script
        that reads this text and prints; its exit code counts.

        Raises:
            RewardError: the runner itself failed. A failure of the program is a Run.
        """
        ...


class LocalRunner:
    """The sandbox of this machine: helper processes that fork for every run.

    They start with the first run, which raises ConfigError if this machine cannot isolate a program
    as `isolation` requires.
    """

    def __init__(self, settings: SandboxConfig | None = None) -> None:
        self.settings = settings or SandboxConfig()
        self.max_concurrent = self.settings.max_concurrent or count_cores()
        self._isolation: str | None = None  # chosen before the first run
        self._probing = threading.Lock()
        self._pool = HelperPool(lambda: start_server(self.settings, str(self._isolation)))

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalRunner, (self.settings,)  # another process has helpers of its own

    def run(self, code: str, tests: list[str], *, stdin: str | None = None) -> Run:
        with self._probing:
            if self._isolation is None:
                self._isolation = choose_isolation(self.settings)

        reason: Exception | None = None

        for _ in range(2):
            try:
                return _ask(self._pool, self.settings, code, tests, stdin)
            except (HelperTimeout, HelperDied) as error:
                reason = error

        raise RewardError(
            f"The sandbox's helper process failed twice on one program: {reason}."
        ) from reason

    def close(self) -> None:
        """End the idle helpers; the next run starts new ones."""
        self._pool.close()


def _ask(
    server: Helper | HelperPool,
    settings: SandboxConfig,
    code: str,
    tests: list[str],
    stdin: str | None = None,
) -> Run:
    request = {
        "code": code,
        "tests": tests,
        "input": stdin or "",
        "is_script": stdin is not None,
        "token": secrets.token_hex(8),  # a run that does not know it cannot fake a passed test
    }
    return Run(**server.ask(request, settings.timeout_s + GRACE_S))


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def default_runner() -> LocalRunner:
    """Return the sandbox that rules use by default."""
    return LocalRunner()


def start_server(settings: SandboxConfig, isolation: str) -> Helper:
    """Start a server process, without our environment, which may hold keys, and our search path."""
    code = code_to_run("verl.rewards.sandbox.server")
    limits = json.dumps({**asdict(settings), "isolation": isolation})
    # More threads of a numeric library would only use up the limit on address space.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": "/tmp", **threads}
    return Helper([sys.executable, "-I", "-c", code, limits], environment, name="the sandbox")


def choose_isolation(settings: SandboxConfig) -> str:
    """Return the strongest isolation that the settings allow and that works on this machine.

    A program that tries to break out tests it.

    Raises:
        ConfigError: no allowed isolation works.
    """
    if settings.isolation == "none":
        logger.warning(
            "reward_model.sandbox.isolation=none: code of the model runs with this user's rights. "
            "Only time, memory and output are limited. Use this only on a machine that is itself a "
            "sandbox."
        )
        return "none"

    wanted = ("namespaces", "seccomp") if settings.isolation == "auto" else (settings.isolation,)
    problems = []
    for isolation in wanted:
        try:
            gaps = _gaps_of(isolation, settings)
        except _NotAvailable as problem:
            problems.append(f"{isolation} not available: {problem}")
            continue
        _report(isolation, problems, gaps)
        return isolation

    raise ConfigError(
        f"Code of the model cannot be isolated on this machine: {'; '.join(problems)}. Allow "
        "unprivileged user namespaces or seccomp, name a sandbox service in "
        "reward_model.sandbox_fusion.url, or, if this machine is itself a disposable sandbox, set "
        "reward_model.sandbox.isolation=none."
    )


_PROBE_S = 20.0
# Each line tries to break out in one way and raises if it succeeds.
_BREAK_OUTS = {
    "network": "socket.socket(); raise SystemExit",
    "processes": "os.fork(); raise SystemExit",
    "signals": "os.kill(os.getppid(), 0); raise SystemExit",
    "signals of files": "fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid()); raise SystemExit",
    "sessions": "os.setsid(); raise SystemExit",
    "writes": "open('/etc/passwd', 'a'); raise SystemExit",
}


def _report(isolation: str, problems: list[str], gaps: list[str]) -> None:
    """Log the isolation in use, as a warning if it is weaker than possible."""
    reason = f" ({'; '.join(problems)})" if problems else ""
    exception = f" Except: {'; '.join(gaps)}." if gaps else ""
    level = logging.WARNING if problems or gaps else logging.INFO
    logger.log(
        level,
        "Sandbox for code: %s%s. It ensures: %s.%s",
        isolation,
        reason,
        _PROTECTIONS[isolation],
        exception,
    )


class _NotAvailable(Exception):
    """An isolation does not work on this machine; the text has the reason."""


def _gaps_of(isolation: str, settings: SandboxConfig) -> list[str]:
    """Return the gaps that an isolation has on this machine. Raises _NotAvailable."""
    if not seccomp.is_supported():
        raise _NotAvailable("it needs Linux on x86-64 or AArch64")

    # A short deadline of programs says nothing of the machine, which may be busy.
    settings = replace(settings, timeout_s=max(settings.timeout_s, _PROBE_S))
    server = start_server(settings, isolation)
    try:
        if "error" in server.greeting:
            raise _NotAvailable(server.greeting["error"])
        tests: list[str] = []
        for attempt in _BREAK_OUTS.values():
            tests.append(f"try:\n    {attempt}\nexcept OSError:\n    pass")
        run = _ask(server, settings, "import fcntl, os, socket", tests)
    except (HelperTimeout, HelperDied) as error:
        raise _NotAvailable(str(error)) from error
    finally:
        server.close()

    if run.status != "finished":
        raise _NotAvailable(run.error or run.status)
    open_ways = [name for name, held in zip(_BREAK_OUTS, run.passed) if not held]
    if open_ways:
        raise _NotAvailable(f"it does not prevent {', '.join(open_ways)}")
    return server.greeting["gaps"]
