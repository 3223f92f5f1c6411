"""SIGTERM, by which schedulers and torchrun end a process."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

TERMINATED = 128 + signal.SIGTERM  # the exit code of a shell's command that the signal has ended


def handle_sigterm(handler: Any) -> None:
    """In this process, not in those that it forks: torch ends the workers of its data loaders by
    this signal."""
    signal.signal(signal.SIGTERM, handler)
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """SIGTERM ends what stands within as Ctrl-C does, and then raises SystemExit; unless the user
    has a handler."""
    handler = signal.getsignal(signal.SIGTERM)
    # Ray's kills what the run still talks to, and ends in an abort.
    is_free = handler is signal.SIG_DFL or (getattr(handler, "__module__", None) or "").startswith(
        "ray."
    )
    if not is_free or threading.current_thread() is not threading.main_thread():
        yield
        return

    interrupt = _Interrupt()
    handle_sigterm(interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if interrupt.is_told:
            raise SystemExit(TERMINATED) from None
        raise
    except Exception as error:
        # Python 3.11 wraps whatever is raised while it creates a class, which imports do a lot.
        if isinstance(error.__cause__, _Terminated):
            raise SystemExit(TERMINATED) from None
        raise
    finally:
        if signal.getsignal(signal.SIGTERM) is interrupt:  # and not of a pool that was made within
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Within `sigterm_as_exit`: what takes the signal for itself, as Ray does at its start, has it
    until then only."""
    handler = signal.getsignal(signal.SIGTERM)
    if (
        not isinstance(handler, _Interrupt)
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    try:
        yield
    except SystemExit:  # by which Ray answers the signal
        handler()
    finally:
        signal.signal(signal.SIGTERM, handler)


class _Interrupt:
    """A handler, which remembers that it was called: of what it raises Ray makes a plain
    KeyboardInterrupt."""

    is_told = False

    def __call__(self, *_: Any) -> None:
        self.is_told = True
        raise _Terminated


class _Terminated(KeyboardInterrupt):
    """Not SystemExit, which a user's code may raise by itself, and which then is that code's
    failure. Nor its base: where that has passed through exec() of a text, as in imports, Python
    ends with the code of Ctrl-C."""
