"""The thread that runs the calls of a rank."""

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from verl.single_controller.host import Raised


class RankThread:
    """Runs jobs one by one, whichever way they come: the current CUDA device and grad mode, say,
    belong to a thread.

    For rank 0 of torchrun, so that the driver can wait for it with a deadline as for others; for an
    actor of Ray, which gets calls in two ways.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._unfinished, self._counting = 0, threading.Lock()
        self.idle = threading.Event()
        self.idle.set()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, job: Callable[[], Any]) -> Future:
        """Of a function that gives the answer, or of a Raised."""
        future: Future = Future()
        self._count(1)
        self._jobs.put((future, job))
        return future

    def _count(self, change: int) -> None:
        with self._counting:
            self._unfinished += change
            (self.idle.clear if self._unfinished else self.idle.set)()

    def _work(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                end: Any = functools.partial(_itself, job())
            except BaseException as error:  # noqa: BLE001 - a border: the driver raises it
                end = Raised.from_error(error)
            self._count(-1)
            future.set_result(end)
            del future, job, end  # or this thread would hold a batch until the next call


def _itself(value: Any) -> Any:
    return value
