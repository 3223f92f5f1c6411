"""A rank's watch over the driver: one that is killed or stopped cannot report it by itself."""

import os
import signal
import socket
import struct
import sys
import threading
import time

from verl.single_controller.wire import Kind, Link

_QUESTIONS = 5  # a driver that is asked so often and answers none of them is stuck
_FIRST_RANK = 1  # reports and ends the driver; the others only do so where it does not
_LATER_S = 5.0
_LEAVE_S = 1.0  # torchrun names the process that it sees dead first, so others leave after it


class Pulse:
    """What this rank knows of its driver."""

    def __init__(self) -> None:
        self.alive = threading.Event()  # it has answered since it was last asked
        self.leaving = threading.Event()  # it has said that this rank may leave


def watch_driver(link: Link, rank: int, silence_s: float) -> Pulse:
    """Ask the driver for a sign of life every so often, in a thread of its own.

    A driver that gives none for `silence_s` is killed where it runs on this machine, and this rank
    ends. Returns the pulse that whoever receives messages keeps up to date.
    """
    pulse = Pulse()
    patience_s = silence_s if rank == _FIRST_RANK else silence_s + _LATER_S
    arguments = (link, patience_s, pulse)
    threading.Thread(
        target=_ask_until_silent, args=arguments, name="verl-watch-driver", daemon=True
    ).start()
    return pulse


def _ask_until_silent(link: Link, patience_s: float, pulse: Pulse) -> None:
    # Counted in questions, not by the clock: after a whole machine was frozen, or a container, the
    # clock says that the driver was silent, and it was not asked.
    unanswered = 0
    # It may have stopped right after an answer, and its end must be reported in time.
    pause_s = patience_s / (_QUESTIONS + 2)
    while unanswered < _QUESTIONS:
        pulse.alive.clear()
        try:
            link.send(Kind.ASK_ALIVE, 0, None)
        except OSError:
            return  # it is gone, which the thread that receives knows as well
        if pulse.leaving.wait(pause_s):
            return
        unanswered = 0 if pulse.alive.is_set() else unanswered + 1

    pid = _pid_of_driver(link)
    where = f"pid {pid}" if pid else "on another machine"
    _report(
        f"rank 0 ({where}), which drives this run, gave no sign of life for "
        f"{_QUESTIONS * pause_s:.3g} s: its "
        "process is stopped or stuck. It and all other ranks are ended. Find out who stopped it "
        "(SIGSTOP, a debugger, a full disk), then start the same command again"
    )
    if pid:
        os.kill(pid, signal.SIGKILL)
    time.sleep(_LEAVE_S)
    os._exit(1)


def exit_after_driver(rank: int) -> None:
    """End this process because the driver closed the connection without saying goodbye."""
    if rank == _FIRST_RANK:
        _report(
            "rank 0, which drives this run, died without a word: it was killed, or its process "
            "crashed. All other ranks are ended. Look into the system's log (dmesg | grep -i "
            "kill), then start the same command again"
        )
    time.sleep(_LEAVE_S)
    os._exit(1)


def _pid_of_driver(link: Link) -> int | None:
    """Its process, where it runs on this machine: the kernel knows who is at the other end."""
    if not link.same_machine or not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = struct.Struct("3i")
    found = link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return credentials.unpack(found)[0]


def _report(text: str) -> None:
    print(f"WorkerLostError: {text}.", file=sys.stderr, flush=True)
