"""Wall-clock seconds per phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from verl.utils.timeline import note_span


class PhaseTimer:
    """Sum up the seconds of each phase by name. The timeline shows phases in the row "phases".

    `started_at_ns` is the wall-clock time at which the timer was created.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started_at_ns = time.time_ns()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            elapsed_s = (time.monotonic_ns() - start_ns) / 1e9
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed_s
            note_span(name, "phases", start_ns)
