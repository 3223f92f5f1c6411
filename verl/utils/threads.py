"""Interrupt a thread, and run event loops in threads of their own."""

import asyncio
import concurrent.futures
import contextlib
import ctypes
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar, cast

T = TypeVar("T")
CANCEL_S = 1.0  # for coroutines of a loop that is closed


class LateCall(BaseException):
    """Raised in an abandoned thread, so that it does not compute forever."""


def interrupt(thread: threading.Thread) -> None:
    """Raise LateCall in a thread at its next Python instruction.

    A call of C code, such as a sleep, returns first.
    """
    if thread.ident is not None:
        ident = ctypes.c_ulong(thread.ident)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(LateCall))


class LoopThread:
    """An event loop in a daemon thread. It goes on after whatever a coroutine raises."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._ended = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Start a coroutine from any thread.

        Raises:
            RuntimeError: the loop has been closed.
        """
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:
            coroutine.close()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the loop, and wait for it."""

        async def called() -> T:
            return function()

        return self.submit(called()).result()

    async def answers(self, within_s: float) -> bool:
        """Return whether the loop makes a step within so many seconds."""
        answered = asyncio.wrap_future(self.submit(_nothing()))
        await asyncio.wait([answered], timeout=within_s)
        # A loop that ends in the meantime cancels the step.
        return answered.done() and not answered.cancelled()

    def close(self) -> None:
        """End the loop; its thread ends with the step that it is in."""
        self._ended = True
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)

    def abandon(self) -> None:
        """End the loop, and interrupt a coroutine that blocks it."""
        interrupt(self.thread)  # before `close`, so that it does not arrive after the last step
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._ended:
            try:
                self.loop.run_forever()
            except RuntimeError:  # an interrupt within the loop's own code left it unusable
                break
            except BaseException:  # noqa: BLE001  (SystemExit of a callback; the loop goes on)
                continue
        self._ended = True
        self._cancel_the_rest()
        self.loop.close()

    def _cancel_the_rest(self) -> None:
        self._cancel(asyncio.all_tasks(self.loop))

        # A coroutine may catch its cancellation and go on. Closing it runs its `finally` clauses.
        # Otherwise Python collects a pending task later, and prints that it was destroyed.
        deaf = asyncio.all_tasks(self.loop)
        for task in deaf:
            coroutine = cast(Coroutine[Any, Any, Any], task.get_coro())
            with contextlib.suppress(BaseException):  # a user's code, which may raise SystemExit
                coroutine.close()
        self._cancel(deaf)

        with contextlib.suppress(RuntimeError):  # as in `_run`
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())

    def _cancel(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Cancel tasks and wait for them, at most CANCEL_S."""
        for task in tasks:
            task.cancel()
        ended = asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(RuntimeError):  # as in `_run`
            self.loop.run_until_complete(asyncio.wait([ended], timeout=CANCEL_S))


async def _nothing() -> None:
    pass
