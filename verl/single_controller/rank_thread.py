"""The thread that runs the calls of a rank."""

import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from verl.single_controller.host import Raised


class RankThread:
    """A thread that runs jobs one by one.

    State such as the current CUDA device and grad mode belongs to a thread, so all calls of a rank
    must run in one. Rank 0 of torchrun needs it, so that the driver can wait for it with a deadline
    as for other ranks. An actor of Ray needs it because it gets calls in two ways.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._unfinished = 0
        self._counting = threading.Lock()
        self.idle = threading.Event()
        self.idle.set()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, job: Callable[[], Any]) -> Future:
        """Run a job later; return the future of a function that returns the answer, or a Raised."""
        future: Future = Future()
        self._count(1)
        self._jobs.put((future, job))
        return future

    def _count(self, change: int) -> None:
        with self._counting:
            self._unfinished += change
            if self._unfinished:
                self.idle.clear()
            else:
                self.idle.set()

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
