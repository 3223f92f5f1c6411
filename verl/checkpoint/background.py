"""Run one piece of work at a time in a thread, and raise its error where it is awaited."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread


class Background:
    """At most one function that runs in a thread of its own.

    The thread does not keep the process alive: a run that ends without `is_done(wait=True)` leaves
    the work undone.
    """

    def __init__(self) -> None:
        self._running: tuple[Future[None], Thread] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Start the work. `is_done` must have returned True for the work before."""
        assert self._running is None, "only one piece of work at a time"
        future = Future[None]()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised again in `is_done`
                future.set_exception(error)

        thread = Thread(target=run, name="verl-background", daemon=True)
        thread.start()
        self._running = future, thread

    def is_done(self, *, wait: bool) -> bool:
        """Return whether nothing is left to do. Raises the work's error, once.

        Args:
            wait: wait for the work.
        """
        if self._running is None:
            return True
        future, thread = self._running
        if not wait and not future.done():
            return False

        # An interrupt of the wait leaves the work here: a later call raises its error.
        future.exception()
        # The thread still frees memory of the work, which must not overlap with the exit.
        thread.join()
        self._running = None
        future.result()
        return True
