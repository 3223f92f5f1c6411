"""SIGTERM, by which schedulers and torchrun end a process."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


def handle_sigterm(handler: Any) -> None:
    """In this process, not in those that it forks: torch ends the workers of its data loaders by this signal."""
    signal.signal(signal.SIGTERM, handler)
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """SIGTERM ends what stands within as Ctrl-C does, and then raises SystemExit; unless the user has a handler."""
    handler = signal.getsignal(signal.SIGTERM)
    # Ray's kills what the run still talks to, and ends in an abort.
    is_free = handler is signal.SIG_DFL or (getattr(handler, "__module__", None) or "").startswith("ray.")
    if not is_free or threading.current_thread() is not threading.main_thread():
        yield
        return
    handle_sigterm(_interrupt)
    try:
        yield
    except _Terminated:
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        signal.signal(signal.SIGTERM, handler)


class _Terminated(KeyboardInterrupt):
    """Not SystemExit, which a user's code may raise by itself, and which then is that code's failure."""


def _interrupt(signum: int, frame: Any) -> None:
    raise _Terminated
