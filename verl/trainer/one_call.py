"""Calls on a trainer from several threads, such as cells of a notebook: one at a time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from verl.utils.errors import ConfigError, WorkerError

_POLL_S = 0.05


class OneCall:
    """Lets one thread at a time use the models of a trainer.

    A call inside another one, of the same thread, goes on: a reward function may roll out.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: list[str] = []  # calls of the thread that holds the lock, outermost first
        self.is_closed = False

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Run the call `name` in this block, after the calls of other threads.

        Raises:
            ConfigError: the trainer is closed.
            WorkerError: `train` runs in another thread. Waiting would take as long as the training.
        """
        while not self._lock.acquire(timeout=_POLL_S):
            if "train" in self._running[:1]:
                raise WorkerError(
                    f"RLTrainer.{name}() was called while train() of the same trainer runs in "
                    "another thread, and both use its models. Call it when train() has returned. "
                    "During training, trainer.test_freq validates and "
                    "trainer.log_val_generations shows responses."
                )

        self._running.append(name)
        try:
            self.require_open(name)
            yield
        finally:
            self._running.pop()
            self._lock.release()

    def require_open(self, name: str) -> None:
        """Raise ConfigError for the call `name` on a trainer that is closed."""
        if self.is_closed:
            raise ConfigError(
                f"RLTrainer.{name} was called after close(), which has freed the models. Make a "
                "new RLTrainer; with trainer.save_freq it goes on from the newest checkpoint."
            )

    @contextmanager
    def last(self, name: str) -> Iterator[None]:
        """Run the call `name` in this block, after which the trainer is closed.

        Raises:
            WorkerError: another call runs, in this thread or, if it is `train`, in another one.
        """
        with self.of(name):
            if len(self._running) > 1:
                raise WorkerError(
                    f"RLTrainer.{name}() was called within {self._running[0]}() of the same "
                    f"trainer, which needs its models. Call it when {self._running[0]}() has "
                    "returned."
                )
            self.is_closed = True
            yield
