"""Work that goes on beside the run: one piece at a time, and what it raises comes out where it is
waited for."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread


class Background:
    """At most one function that runs in a thread of its own.

    The thread does not keep the process alive: a run that ends without `is_done(wait=True)` leaves
    the work undone.
    """

    def __init__(self) -> None:
        self._future: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin; what was started before must have been seen done."""
        assert self._future is None, "only one piece of work at a time"
        future = self._future = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised again in `is_done`
                future.set_exception(error)

        Thread(target=run, name="checkpoint", daemon=True).start()

    def is_done(self, *, wait: bool) -> bool:
        """Whether nothing is left to do; with `wait` that is waited for. What the work raised is
        raised here, once."""
        future = self._future
        if future is None:
            return True
        if not wait and not future.done():
            return False
        try:
            future.result()
        finally:
            self._future = None
        return True
