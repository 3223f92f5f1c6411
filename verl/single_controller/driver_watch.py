"""A rank's watch over the driver, which cannot report itself that it was killed or stopped."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from verl.single_controller.wire import Kind, Link
from verl.utils.scratch import remove_scratch

_QUESTIONS = 5  # a driver that leaves so many in a row unanswered is stuck
_FIRST_RANK = 1  # it reports and ends the driver; other ranks do so only if this one does not
_LATER_S = 5.0
_LEAVE_S = 1.0  # torchrun names the process that dies first, so other ranks leave after it


class Pulse:
    """The state of the driver as this rank knows it."""

    def __init__(self) -> None:
        self.alive = threading.Event()  # the driver has answered the last question
        self.leaving = threading.Event()  # the driver has asked this rank to leave


def watch_driver(link: Link, rank: int, silence_s: float, folder: Path) -> Pulse:
    """Ask the driver for a sign of life at regular intervals, in a thread of its own.

    If the driver gives none for `silence_s`, this rank ends, and kills the driver if it is on this
    machine. Returns the pulse, which the receiver of messages must keep up to date.

    Args:
        folder: of the ranks' notes, which is removed then.
    """
    pulse = Pulse()
    patience_s = silence_s
    if rank != _FIRST_RANK:
        patience_s += _LATER_S
    arguments = (link, patience_s, pulse, folder)
    threading.Thread(
        target=_ask_until_silent, args=arguments, name="verl-watch-driver", daemon=True
    ).start()
    return pulse


def _ask_until_silent(link: Link, patience_s: float, pulse: Pulse, folder: Path) -> None:
    # Count questions instead of time: after a machine or a container was frozen, the clock would
    # show a silent driver that was not asked.
    unanswered = 0
    # The driver may stop right after an answer, and that must be reported in time.
    pause_s = patience_s / (_QUESTIONS + 2)

    while unanswered < _QUESTIONS:
        pulse.alive.clear()
        try:
            link.send(Kind.ASK_ALIVE, 0, None)
        except OSError:
            return  # the driver is gone; the receiving thread notices that as well
        if pulse.leaving.wait(pause_s):
            return
        unanswered = 0 if pulse.alive.is_set() else unanswered + 1

    pid = link.pid_of_peer()
    where = f"pid {pid}" if pid else "on another machine"
    _report(
        f"rank 0 ({where}), which drives this run, gave no sign of life for "
        f"{_QUESTIONS * pause_s:.3g} s: its "
        "process is stopped or stuck. It and all other ranks are ended. Find the cause (SIGSTOP, a "
        "debugger, a full disk), then run the same command again"
    )
    if pid:
        os.kill(pid, signal.SIGKILL)
    _leave(folder)


def exit_after_driver(rank: int, folder: Path) -> None:
    """End this process because the driver closed the connection without saying goodbye."""
    if rank == _FIRST_RANK:
        _report(
            "rank 0, which drives this run, died without a message: it was killed, or its process "
            "crashed. All other ranks are ended. Look at the system log (dmesg | grep -i kill), "
            "then run the same command again"
        )
    _leave(folder)


def _leave(folder: Path) -> None:
    remove_scratch(folder)
    time.sleep(_LEAVE_S)
    os._exit(1)


def _report(text: str) -> None:
    print(f"WorkerLostError: {text}.", file=sys.stderr, flush=True)
