"""Limit the seconds that a function may take: verl 0.5's decorator `timeout_limit`."""

import functools
import multiprocessing
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from verl.utils.children import describe_end
from verl.utils.errors import ConfigError, describe_error, sendable

Function = Callable[..., Any]

# Time between asking a child to end and killing it.
_END_S = 1.0


def timeout_limit(seconds: float, use_signals: bool = False) -> Function:
    """Decorate a function to raise TimeoutError if a call takes longer than `seconds`.

    Args:
        use_signals: interrupt the call by SIGALRM, in the main thread of a Unix process. Otherwise
            it runs in a process of its own, which is ended at the limit. Then its result or error
            must be picklable, and its changes of variables are lost.

    Raises ConfigError for a limit that is not above 0, which the system takes for no limit.
    """
    if seconds <= 0:
        raise ConfigError(f"timeout_limit needs seconds above 0, got {seconds}.")

    def decorate(function: Function) -> Function:
        run = _with_alarm if use_signals else _in_process

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            return run(function, seconds, args, kwargs)

        return limited

    return decorate


def _name(function: Function) -> str:
    return getattr(function, "__name__", repr(function))


def _too_long(function: Function, seconds: float) -> TimeoutError:
    return TimeoutError(f"Function {_name(function)} timed out after {seconds} seconds.")


def _with_alarm(
    function: Function, seconds: float, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "timeout_limit(use_signals=True) needs the main thread, where signals arrive. Use "
            "use_signals=False."
        )

    def expire(number: int, frame: Any) -> None:
        raise _too_long(function, seconds)

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return function(*args, **kwargs)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _in_process(
    function: Function, seconds: float, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    # Fork, so that the function need not be picklable: its name refers to the decorated one.
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(writer, function, args, kwargs))
    process.start()
    writer.close()

    try:
        if not reader.poll(seconds):
            raise _too_long(function, seconds)
        is_well, value = reader.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"The process of {_name(function)} {describe_end(process.exitcode)}, before it "
            "answered."
        ) from None
    finally:
        reader.close()
        _end(process)

    if is_well:
        return value
    raise value


def _answer(
    writer: Connection,
    function: Function,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    try:
        writer.send((True, function(*args, **kwargs)))
    except Exception as error:  # noqa: BLE001 - a process border: the parent raises it
        writer.send((False, sendable(error) or RuntimeError(describe_error(error))))


def _end(process: Any) -> None:
    process.terminate()
    process.join(_END_S)
    if process.is_alive():
        process.kill()
        process.join()
