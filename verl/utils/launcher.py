"""The process that launched this one: the rank that it gives, and its end."""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from verl.utils.errors import ConfigError
from verl.utils.sigterm import TERMINATED

# In the environment of a launch that was divided: its ranks; WORLD_SIZE is then that of a part.
LAUNCHED_RANKS = "VERL_LAUNCHED_RANKS"
# In the environment of a rank whose group is a part of the run: the ranks of the run in its group.
RANKS_OF_GROUP = "VERL_RANKS_OF_GROUP"
_POLL_S = 1.0
_GRACE_S = 10.0  # after SIGTERM, which has no effect while the main thread waits in C++
_THREAD = "verl-watch-launcher"
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def end_with_launcher() -> None:
    """End this process once torchrun's agent is gone, for any reason.

    Otherwise a rank of torchrun waits for minutes for a rendezvous that no longer exists. The
    kernel sends SIGTERM when the agent dies; a thread ends the process if that has no effect. Call
    this before heavy imports. Without torchrun, and on a second call, it does nothing.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or _watched_by_this_process():
        return

    launcher = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
        if _is_orphan(launcher):
            _report_gone()
            os._exit(TERMINATED)

    reported = threading.Event()
    # The signal may end the process before the thread notices.
    atexit.register(_report_at_exit, launcher, reported)
    threading.Thread(target=_watch, args=(launcher, reported), name=_THREAD, daemon=True).start()


def launched_ranks() -> int:
    """Return the number of ranks that were launched together; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_rank() -> tuple[int, int]:
    """Return (rank, world size) from the environment; (0, 1) in a process without a launcher.

    Raises ConfigError if torchrun's variables are incomplete.
    """
    world_size = launched_ranks()
    if world_size == 1:
        return 0, 1
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={world_size} says that several ranks were launched, but "
            f"{' and '.join(missing)} of the environment are not set. Launch with torchrun, which "
            "sets them, or unset WORLD_SIZE for one process."
        )
    return int(os.environ["RANK"]), world_size


def run_rank(rank: int) -> int:
    """Return the number that a rank of this process's group has among all ranks of the run."""
    members = os.environ.get(RANKS_OF_GROUP)
    return int(members.split(",")[rank]) if members else rank


def rank_title(rank: int, size: int) -> str:
    """Return the name of a rank for errors: its number in the run, and that in its group.

    Args:
        rank: number within the group.
        size: ranks of the group. One rank that is the whole run has the name "".
    """
    if RANKS_OF_GROUP not in os.environ:
        return "" if size == 1 else f"rank {rank} of {size}"
    number = f"rank {run_rank(rank)} of the run"
    return number if size == 1 else f"{number} (rank {rank} of {size} in its group)"


def _watched_by_this_process() -> bool:
    return any(thread.name == _THREAD for thread in threading.enumerate())


def _is_orphan(parent: int) -> bool:
    """Return whether the agent died before this process asked for its parent.

    Process 1 adopts orphans. In a container the agent itself may be process 1, so process 1 counts
    only if it is no Python program.
    """
    if parent != 1:
        return False
    with contextlib.suppress(OSError):
        command = Path("/proc/1/cmdline").read_bytes()
        return b"python" not in command and b"torchrun" not in command
    return False


def _watch(launcher: int, reported: threading.Event) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_S)

    reported.set()
    _report_gone()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(TERMINATED)


def _report_at_exit(launcher: int, reported: threading.Event) -> None:
    # A forked child inherits this function, but not the thread.
    if _watched_by_this_process() and os.getppid() != launcher and not reported.is_set():
        _report_gone()


def _report_gone() -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            "The launcher (torchrun) of these ranks is gone, so they end. If it was not stopped on "
            "purpose, look for the reason in the system log (dmesg), then run the same command "
            "again.",
            file=sys.stderr,
            flush=True,
        )
