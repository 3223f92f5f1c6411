"""Handle SIGTERM, by which schedulers and torchrun end a process, and repeated Ctrl-C."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from traceback import walk_tb
from types import FrameType
from typing import Any

TERMINATED = 128 + signal.SIGTERM  # a shell's exit code for a command that the signal ended
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
# Signals by which people and schedulers end or warn a process.
_ENDING = (*_INTERRUPTS, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A terminal sends Ctrl-C to torchrun and to its ranks, and torchrun then sends it to them again.
_SAME_S = 1.0


def in_main_thread() -> bool:
    """Return whether this thread is the main one, where alone handlers can be set."""
    return threading.current_thread() is threading.main_thread()


def handle_sigterm(handler: Any) -> None:
    """Set a handler in this process, but not in its forks.

    torch ends the workers of its data loaders by this signal.
    """
    signal.signal(signal.SIGTERM, handler)
    os.register_at_fork(after_in_child=partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM interrupt the code within as Ctrl-C does, then raise SystemExit.

    Either signal interrupts once, also if it is repeated within a second. A handler that the user
    has set stays in place. Within another such context, the handler is that of the outer one.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, _Interrupt):
        with _terminated_as_exit(handler):
            yield
        return

    # Ray's handler kills processes that the run still needs, and ends in an abort.
    is_from_ray = (getattr(handler, "__module__", None) or "").startswith("ray.")
    is_free = handler is signal.SIG_DFL or is_from_ray
    if not is_free or not in_main_thread():
        yield
        return

    interrupt = _Interrupt()
    handle_sigterm(interrupt)
    hears_ctrl_c = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if hears_ctrl_c:
        signal.signal(signal.SIGINT, interrupt)
    try:
        with _terminated_as_exit(interrupt):
            yield
    finally:
        # A pool that was created within may have set its own handler.
        if signal.getsignal(signal.SIGTERM) is interrupt:
            signal.signal(signal.SIGTERM, handler)
        if hears_ctrl_c and signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _terminated_as_exit(interrupt: "_Interrupt") -> Iterator[None]:
    """Raise SystemExit for the exception by which `interrupt` has answered SIGTERM."""
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


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Restore the handler of `sigterm_as_exit` at the end of this context.

    For code that installs a handler of its own, as Ray does when it starts.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if not isinstance(handler, _Interrupt) or not in_main_thread():
        yield
        return
    try:
        yield
    except SystemExit:  # raised by Ray's handler
        handler()
    finally:
        signal.signal(signal.SIGTERM, handler)


def raise_swallowed() -> None:
    """Raise again if `sigterm_as_exit` has raised an interrupt that ended nothing.

    Packages have bare `except:` around their optional imports, which swallow it. Call this at the
    top of the program, before a long wait.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, _Interrupt) and handler.has_raised:
        raise _Terminated if handler.was_called else KeyboardInterrupt


def raised_by_signal(error: BaseException) -> bool:
    """Return whether a handler of a signal raised the error, or `sigterm_as_exit` for one.

    A SystemExit of another origin is `sys.exit()` of the code that ran. Handlers are those set now,
    and only functions, methods and objects with `__call__` in Python are recognized.
    """
    if isinstance(error, SystemExit) and error.code == TERMINATED:
        return True

    codes = set()
    for number in _ENDING:
        handler = signal.getsignal(number)
        if callable(handler):
            codes.add(getattr(handler, "__code__", None))
            codes.add(getattr(type(handler).__call__, "__code__", None))

    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


@contextmanager
def interrupts_wait(work: str | None = None) -> Iterator[None]:
    """Let the code within end before Ctrl-C or SIGTERM interrupts the run.

    A second signal interrupts at once.

    Args:
        work: name of the code within for the message; None: no message, for work of a moment.
    """
    if not in_main_thread():
        yield
        return

    # Signals that are ignored, or handled outside Python, stay as they are.
    handlers = {number: signal.getsignal(number) for number in _INTERRUPTS}
    own: dict[int, Any] = {number: old for number, old in handlers.items() if callable(old)}
    held = _HeldInterrupt(work, own)
    for number in own:
        signal.signal(number, held)
    try:
        yield
    finally:
        for number, handler in own.items():
            if signal.getsignal(number) is held:
                signal.signal(number, handler)
    held.deliver()


class _HeldInterrupt:
    """A handler that remembers the first signal, and hands a second one on."""

    def __init__(self, work: str | None, handlers: Mapping[int, Any]) -> None:
        self.work = work
        self.handlers = handlers
        self.number: int | None = None
        self.came_at = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self.came_at = number, now
            if self.work is None:
                return
            name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
            # Not by the logger: the signal may have interrupted one of its lines.
            line = f"W {name}: {self.work} is finished first. A second {name} ends the run at once."
            with suppress(OSError):
                os.write(2, f"{line}\n".encode())
        elif now - self.came_at > _SAME_S:
            self.handlers[number](number, frame)

    def deliver(self) -> None:
        """Call the handler of the signal that came meanwhile, if any."""
        if self.number is not None:
            self.handlers[self.number](self.number, None)


def exit_at_next_interrupt() -> None:
    """End the process at a further Ctrl-C, without the traceback of what Python does at exit."""
    if not in_main_thread():
        return
    since = time.monotonic()

    def end(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - since > _SAME_S:
            os._exit(128 + number)

    signal.signal(signal.SIGINT, end)


class _Interrupt:
    """A handler of both signals, which raises once for those of the same second.

    It remembers SIGTERM, because Ray turns its exception into KeyboardInterrupt.
    """

    was_called = False

    def __init__(self) -> None:
        self._raised_at = -math.inf

    @property
    def has_raised(self) -> bool:
        return self._raised_at > -math.inf

    def __call__(self, number: int = signal.SIGTERM, *_: Any) -> None:
        now = time.monotonic()
        if now - self._raised_at < _SAME_S:
            return
        self._raised_at = now
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        self.was_called = True
        raise _Terminated


class _Terminated(KeyboardInterrupt):
    """The exception of the handler.

    SystemExit would not do: a user's code may raise it, and then it is a failure of that code. Nor
    would a plain KeyboardInterrupt: if it passes through exec() of a text, as in imports, Python
    exits with the code of Ctrl-C.
    """
