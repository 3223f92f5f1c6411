"""Handle SIGTERM, by which schedulers and torchrun end a process."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

TERMINATED = 128 + signal.SIGTERM  # a shell's exit code for a command that the signal ended


def handle_sigterm(handler: Any) -> None:
    """Set a handler in this process, but not in its forks.

    torch ends the workers of its data loaders by this signal.
    """
    signal.signal(signal.SIGTERM, handler)
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM interrupt the code within as Ctrl-C does, then raise SystemExit.

    A handler that the user has set stays in place.
    """
    handler = signal.getsignal(signal.SIGTERM)
    # Ray's handler kills processes that the run still needs, and ends in an abort.
    is_from_ray = (getattr(handler, "__module__", None) or "").startswith("ray.")
    is_free = handler is signal.SIG_DFL or is_from_ray
    if not is_free or threading.current_thread() is not threading.main_thread():
        yield
        return

    interrupt = _Interrupt()
    handle_sigterm(interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if interrupt.was_called:
            raise SystemExit(TERMINATED) from None
        raise
    except Exception as error:
        # Python 3.11 wraps an exception that is raised while it creates a class, as imports do.
        if isinstance(error.__cause__, _Terminated):
            raise SystemExit(TERMINATED) from None
        raise
    finally:
        # A pool that was created within may have set its own handler.
        if signal.getsignal(signal.SIGTERM) is interrupt:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Restore the handler of `sigterm_as_exit` at the end of this context.

    For code that installs a handler of its own, as Ray does when it starts.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if (
        not isinstance(handler, _Interrupt)
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    try:
        yield
    except SystemExit:  # raised by Ray's handler
        handler()
    finally:
        signal.signal(signal.SIGTERM, handler)


class _Interrupt:
    """A handler that remembers its call, because Ray turns its exception into KeyboardInterrupt."""

    was_called = False

    def __call__(self, *_: Any) -> None:
        self.was_called = True
        raise _Terminated


class _Terminated(KeyboardInterrupt):
    """The exception of the handler.

    SystemExit would not do: a user's code may raise it, and then it is a failure of that code. Nor
    would a plain KeyboardInterrupt: if it passes through exec() of a text, as in imports, Python
    exits with the code of Ctrl-C.
    """
