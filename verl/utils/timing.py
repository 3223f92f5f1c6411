"""Wall-clock seconds per phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Adds up seconds per phase name; a phase entered twice is summed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
