"""The fault of a case of `faults.py`, which runs name as `model.external_lib`.

So every process of a role imports it. FAULT_KIND, FAULT_RANK and FAULT_METHOD choose the fault; it
comes with the second call of the method, and its time goes to FAULT_FILE.
"""

import ctypes
import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.workers import ActorWorker, RolloutWorker

FAULTS: dict[str, Callable[[], Any]] = {
    "kill -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "os._exit": lambda: os._exit(7),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "segfault": lambda: ctypes.string_at(0),
}


def with_fault(method: Any) -> Any:
    """Return the method, which fails at its second call on the rank of the case."""
    calls = 0

    @functools.wraps(method)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and os.environ.get("RANK", "0") == os.environ["FAULT_RANK"]:
            Path(os.environ["FAULT_FILE"]).write_text(str(time.time()))
            kind = os.environ["FAULT_KIND"]
            if kind == "exception":
                raise KeyError("injected")
            FAULTS[kind]()
        return method(*args, **kwargs)

    return faulty


name = os.environ.get("FAULT_METHOD")
if name:
    worker = ActorWorker if hasattr(ActorWorker, name) else RolloutWorker
    setattr(worker, name, with_fault(getattr(worker, name)))
