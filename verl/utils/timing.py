"""Wall-clock seconds per phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from verl.utils.timeline import note_span


class PhaseTimer:
    """Adds up seconds per phase name; a phase entered twice is summed. The timeline shows each in
    its row "phases".

    `started_at_ns` is the wall clock's time at which this was made.
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
            self.seconds[name] = (
                self.seconds.get(name, 0.0) + (time.monotonic_ns() - start_ns) / 1e9
            )
            note_span(name, "phases", start_ns)
