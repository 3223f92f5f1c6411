"""The process that launched this one: a rank must not outlive it."""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from verl.utils.sigterm import TERMINATED

_POLL_S = 1.0
_GRACE_S = 10.0  # after SIGTERM, which a thread that waits in C++ does not see
_THREAD = "verl-watch-launcher"
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


def end_with_launcher() -> None:
    """End this process once torchrun's agent is gone, however that ended.

    A rank of torchrun otherwise waits for a rendezvous that no longer exists, for minutes. The
    kernel sends SIGTERM when the agent dies; a thread ends the process where that has no effect.
    Call this before heavy imports. Without torchrun, and when called again, it does nothing.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or _watched_by_this_process():
        return

    launcher = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
        if _is_orphan(launcher):
            _say_gone()
            os._exit(TERMINATED)
    said = threading.Event()
    # The signal may end the process before the thread has looked.
    atexit.register(_say_at_exit, launcher, said)
    threading.Thread(target=_watch, args=(launcher, said), name=_THREAD, daemon=True).start()


def _watched_by_this_process() -> bool:
    return any(thread.name == _THREAD for thread in threading.enumerate())


def _is_orphan(parent: int) -> bool:
    """Whether the agent died before this process looked: process 1 has adopted it, and is no
    Python program (in a container the agent itself may be process 1)."""
    if parent != 1:
        return False
    with contextlib.suppress(OSError):
        command = Path("/proc/1/cmdline").read_bytes()
        return b"python" not in command and b"torchrun" not in command
    return False


def _watch(launcher: int, said: threading.Event) -> None:
    while os.getppid() == launcher:
        time.sleep(_POLL_S)
    said.set()
    _say_gone()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(TERMINATED)


def _say_at_exit(launcher: int, said: threading.Event) -> None:
    # A forked child inherits this function, but not the thread.
    if _watched_by_this_process() and os.getppid() != launcher and not said.is_set():
        _say_gone()


def _say_gone() -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            "The launcher (torchrun) of these ranks is gone, so they end. If nobody stopped it, "
            "look for the reason in the system's log (dmesg), then start the same command again.",
            file=sys.stderr,
            flush=True,
        )
