"""A line of the log every ten seconds of a long phase: its name, and how far it is."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from verl.single_controller.breadcrumbs import Progress
from verl.utils.logging import logger

EVERY_S = 10.0
_TICKS = 10  # looks at the clock within that time


class _Phase:
    def __init__(self, name: str, every_s: float) -> None:
        self.name = name
        self.started = time.monotonic()
        self.due = self.started + every_s
        self.own: Progress | None = None


class PhaseReports:
    """Logs phases that take long, from a thread of its own; short phases leave no line.

    Args:
        read: gives how far the ranks are, each for itself, as far as the driver can see them.
        every_s: seconds between two lines.
    """

    def __init__(self, read: Callable[[], Sequence[Progress]], every_s: float = EVERY_S) -> None:
        self._read = read
        self._every_s = every_s
        self._phases: list[_Phase] = []
        self._running = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch a phase of the driver. The innermost of nested phases is reported."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._report_forever, name="verl-watch-phases", daemon=True
            )
            self._thread.start()
        self._phases.append(_Phase(name, self._every_s))
        self._running.set()
        try:
            yield
        finally:
            self._phases.pop()
            if not self._phases:
                self._running.clear()

    def note(self, done: int, total: int, unit: str) -> None:
        """Note how far the driver itself is with the innermost phase."""
        if self._phases:
            self._phases[-1].own = Progress(done, total, unit)

    def _report_forever(self) -> None:
        while True:
            self._running.wait()
            time.sleep(self._every_s / _TICKS)
            phases = self._phases.copy()
            if phases and time.monotonic() >= phases[-1].due:
                phases[-1].due += self._every_s
                logger.info("%s", self._line(phases))

    def _line(self, phases: Sequence[_Phase]) -> str:
        seconds = time.monotonic() - phases[-1].started
        parts = [f"{phase.own}" for phase in phases if phase.own is not None]
        by_rank = [progress for progress in self._read() if progress.total > 0]
        if by_rank:
            parts.append(str(sum(by_rank[1:], start=by_rank[0])))
        details = "".join(f", {part}" for part in parts)
        return f"Phase {phases[-1].name}: {seconds:.0f} s so far{details}"
