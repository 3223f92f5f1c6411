"""Reports on long phases: how far they are, at which rate, and the time left.

A terminal shows one line that is written over; elsewhere the log gets a line every ten seconds.
"""

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from verl.single_controller.breadcrumbs import Progress
from verl.utils.logging import logger
from verl.utils.streams import reopen_streams

EVERY_S = 10.0
_REDRAW_S = 0.5
_CLEAR = "\r\x1b[2K"
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
        is_on: whether anything is reported.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[Progress]],
        every_s: float = EVERY_S,
        *,
        is_on: bool = True,
    ) -> None:
        self._read = read
        self._is_on = is_on
        # None: the shell has closed standard output.
        on_terminal = sys.stdout is not None and sys.stdout.isatty()
        self._status = StatusLine() if is_on and on_terminal else None
        self._every_s = _REDRAW_S if self._status else every_s
        self._phases: list[_Phase] = []
        self._running = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watch a phase of the driver. The innermost of nested phases is reported."""
        if self._thread is None and self._is_on:
            self._start_thread()
        self._phases.append(_Phase(name, self._every_s))
        self._running.set()
        try:
            yield
        finally:
            self._phases.pop()
            if not self._phases:
                self._running.clear()
            if self._status is not None:
                self._status.clear()

    def note(self, done: int, total: int, unit: str) -> None:
        """Note how far the driver itself is with the innermost phase."""
        if self._phases:
            self._phases[-1].own = Progress(done, total, unit)

    def _start_thread(self) -> None:
        """Start the thread, which keeps neither this object nor the trainer that it reads."""
        own = weakref.ref(self)
        running = self._running
        pause_s = self._every_s / _TICKS
        weakref.finalize(self, running.set)

        def report_forever() -> None:
            while True:
                running.wait()
                time.sleep(pause_s)
                reports = own()
                if reports is None:
                    return
                reports._report()
                del reports  # before the next wait

        self._thread = threading.Thread(
            target=report_forever, name="verl-watch-phases", daemon=True
        )
        self._thread.start()

    def _report(self) -> None:
        phases = self._phases.copy()
        if phases and time.monotonic() >= phases[-1].due:
            phases[-1].due += self._every_s
            if self._status is None:
                logger.info("%s", self._line(phases))
            else:
                self._status.show(self._line(phases))

    def _line(self, phases: Sequence[_Phase]) -> str:
        last = phases[-1]
        seconds = time.monotonic() - last.started
        known = [phase.own for phase in phases if phase.own is not None]
        by_rank = [progress for progress in self._read() if progress.total > 0]
        if by_rank:
            known.append(sum(by_rank[1:], start=by_rank[0]))

        parts = [str(progress) for progress in known]
        if known and seconds > 0:
            progress = known[-1]
            if 0 < progress.done < progress.total:
                rate = progress.done / seconds
                left_s = (progress.total - progress.done) / rate
                parts.append(f"{rate:.3g} a second, about {left_s:.0f} s left")
        details = "".join(f", {part}" for part in parts)
        return f"Phase {last.name}: {seconds:.0f} s so far{details}"


class StatusLine:
    """A line of a terminal that is written over, and removed before a line of the log."""

    def __init__(self) -> None:
        self._is_shown = False
        self._lock = threading.Lock()
        logger.addFilter(self._before_log)

    def show(self, text: str) -> None:
        """Write over the line."""
        with self._lock:
            reopen_streams()
            sys.stdout.write(f"{_CLEAR}{text}")
            sys.stdout.flush()
            self._is_shown = True

    def clear(self) -> None:
        """Remove the line, if there is one."""
        with self._lock:
            if self._is_shown:
                reopen_streams()
                sys.stdout.write(_CLEAR)
                sys.stdout.flush()
                self._is_shown = False

    def _before_log(self, record: logging.LogRecord) -> bool:
        self.clear()
        return True
