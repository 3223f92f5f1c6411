"""Ray's own processes: start a Ray for a run, end it, and watch Ray's control service (GCS)."""

import atexit
import gc
import importlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import ray

from verl.utils.errors import WorkerLostError
from verl.utils.logging import logger

LATE = "timed out during startup"  # in Ray's message
_POLL_S = 1.0
_CONNECT_S = 5.0
# Ray itself gives up after 60 s and ends the driver without a message. The control service of a
# cluster may be restarted in that time; that of a run's own Ray is not.
_OWN_GRACE_S = 3.0
_CLUSTER_GRACE_S = 45.0
# This variable makes Ray use the loopback address for its node, as it does on macOS.
_RAY_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

# Ray's agents outlive a killed driver by a minute: they try to report to the control service, which
# has ended with the driver. The keeper is a separate process, because a killed driver cannot act.
_KEEPER = """
import os, pathlib, signal, sys, time
driver, *agents = map(int, sys.argv[1:])
while os.getppid() == driver:
    time.sleep(0.25)
for pid in agents:
    try:
        if b"ray" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
"""

_own = False
_session: Path | None = None  # the folder of the run's own Ray
_kept: set[Path] = set()  # folders that stay
_keepers: list[subprocess.Popen[bytes]] = []  # one for each Ray that this process has started


def is_own() -> bool:
    """Return whether this run has started the connected Ray: one node, which cannot grow."""
    return _own and ray.is_initialized()


def note_own(own: bool) -> None:
    """Remember whether this run has started the Ray that it is connected to."""
    global _own
    _own = own


def starts_its_own(address: str | None) -> bool:
    """Return whether `ray.init(address)` starts a Ray on this machine instead of joining one."""
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address is not None:
        return address == "local"
    services: Any = importlib.import_module("ray._private.services")
    return services.get_ray_address_from_environment(None, None) is None


@contextmanager
def on_loopback() -> Iterator[None]:
    """Make a Ray that is started within this context listen only on the loopback address.

    By default its ports, and those of every worker, are open to the network.
    """
    constants: Any = importlib.import_module("ray._private.ray_constants")
    name = "ENABLE_RAY_CLUSTER"
    before = getattr(constants, name)
    variable = os.environ.get(_RAY_CLUSTERS)
    os.environ[_RAY_CLUSTERS] = "0"  # read by the processes that Ray starts
    setattr(constants, name, False)  # read already by this one
    try:
        yield
    finally:
        setattr(constants, name, before)
        if variable is None:
            del os.environ[_RAY_CLUSTERS]
        else:
            os.environ[_RAY_CLUSTERS] = variable


@cache
def keep_clients_in_forks() -> None:
    """Exempt the objects that a fork of this process inherits from its garbage collection.

    `ray.init` leaves clients of the control service to the collector. Their destructors end with
    SIGSEGV in a fork, which lacks the threads of Ray.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def init_patiently(**arguments: Any) -> None:
    """Call `ray.init`, and once more if the Ray that it starts was not ready within 30 s.

    Ray waits no longer for its own processes, which a busy machine may need.
    """
    for is_last in (False, True):
        try:
            ray.init(**arguments)
            return
        except Exception as error:  # Ray raises no class of its own for it
            if LATE not in str(error):
                raise
            ray.shutdown()
            _end_half_started()
            if is_last:
                raise

        logger.warning(
            "Ray was not ready within 30 s, with a load of %.0f on %d cores. It is started again.",
            os.getloadavg()[0],
            os.cpu_count(),
        )


def _end_half_started() -> None:
    """End the processes of a Ray that was not ready in time, which Ray leaves running."""
    for child in psutil.Process().children():
        if child.name() in ("gcs_server", "raylet"):
            child.kill()
            child.wait()


def end_agents_with_driver() -> None:
    """Start a process that ends the agents of this run's own Ray when the driver ends.

    The kernel ends Ray's other processes, on Linux.
    """
    if sys.platform != "linux":
        return
    agents: list[str] = []
    for child in psutil.Process().children(recursive=True):
        if _parent_name(child) == "raylet":
            agents.append(str(child.pid))

    command = [sys.executable, "-I", "-S", "-c", _KEEPER, str(os.getpid()), *agents]
    # A session of its own: Ctrl-C and the end of a terminal do not reach it.
    keeper = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _keepers.append(keeper)


def remove_session_at_exit() -> None:
    """Remove the folder of this run's own Ray, with its logs and sockets, when this process ends.

    Ray itself never does. The folder stays after `keep_session`, and after a kill of this process.
    """
    global _session
    _session = _session_folder()
    atexit.register(_remove_session, _session, os.getpid())


def _session_folder() -> Path:
    """Return the folder of the connected Ray on each of its machines, with sockets and logs."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir()) / context.get_session_name()


def keep_session() -> None:
    """Keep the folder of this run's own Ray: its logs may have the reason for a lost process."""
    if _session is not None and _session not in _kept:
        _kept.add(_session)
        logger.warning("The logs of Ray's processes stay in %s.", _session / "logs")


def _remove_session(session: Path, owner: int) -> None:
    if os.getpid() != owner:  # a fork
        return
    ray.shutdown()  # Ray's own handler runs after this one
    if session in _kept:
        return
    shutil.rmtree(session, ignore_errors=True)
    latest = session.parent / "session_latest"
    if latest.is_symlink() and latest.readlink() == session:
        latest.unlink(missing_ok=True)


def _parent_name(process: psutil.Process) -> str | None:
    try:
        parent = process.parent()
        return parent.name() if parent is not None else None
    except psutil.NoSuchProcess:
        return None


class ControlWatch:
    """A thread that notices the end of Ray's control service long before Ray does."""

    def __init__(self) -> None:
        self.address: str = ray.get_runtime_context().gcs_address
        self._logs = _session_folder() / "logs"  # asked for while the service answers
        self.grace_s = _OWN_GRACE_S if is_own() else _CLUSTER_GRACE_S
        self.reason: str | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="verl-watch-gcs", daemon=True).start()

    def check(self) -> None:
        """Raise WorkerLostError if the service is gone."""
        if self.reason is not None:
            raise WorkerLostError(self.reason)

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _watch(self) -> None:
        last_seen = time.monotonic()
        while not self._closed.wait(_POLL_S):
            error = refusal(self.address, _CONNECT_S)
            if error is None:
                last_seen = time.monotonic()
            elif time.monotonic() - last_seen > self.grace_s:
                self.reason = (
                    f"Ray's control service (GCS, {self.address}) is gone: {error}. Without it Ray "
                    "ends all processes within a minute. Look for the reason in the system log "
                    f"(dmesg | grep -i kill) and in {self._logs / 'gcs_server.out'}, then run the "
                    "same command again."
                )
                logger.error("%s", self.reason)
                keep_session()
                return


def refusal(address: str, timeout_s: float) -> OSError | None:
    """Return the error if nothing answers at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError as error:
        return error
    return None
