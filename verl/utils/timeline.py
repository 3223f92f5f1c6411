"""Record time spans in every process; a driver writes those of all processes as a Chrome trace."""

import functools
import itertools
import json
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

# Equal in all containers of a machine, which share its clock.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KEPT = 20_000  # spans of a process: a few MB, and more than one step has


class Span(NamedTuple):
    """A named span of time, in nanoseconds of this machine's monotonic clock."""

    name: str
    row: str  # spans of a row are drawn on one line, nested ones below the enclosing span
    start_ns: int
    end_ns: int
    overlaps: bool  # whether it may overlap other spans of its row without being nested


class Recorded(NamedTuple):
    """The latest spans of one process, and the offset of its clock."""

    machine: str
    pid: int
    wall_offset_ns: int  # wall clock minus monotonic clock
    spans: list[Span]


_latest: deque[Span] = deque(maxlen=_KEPT)


@contextmanager
def span(name: str, row: str) -> Iterator[None]:
    """Record the start and end of this context, also if it raises. Takes about 2 us."""
    start_ns = time.monotonic_ns()
    try:
        yield
    finally:
        note_span(name, row, start_ns)


def note_span(name: str, row: str, start_ns: int, *, overlaps: bool = False) -> None:
    """Record a span from `start_ns` until now."""
    _latest.append(Span(name, row, start_ns, time.monotonic_ns(), overlaps))


def recorded_since(wall_ns: int) -> Recorded:
    """Return the spans of this process that ended after a wall-clock time, at most 20,000."""
    offset = time.time_ns() - time.monotonic_ns()
    recent = []
    # Copy first: another thread may append during the loop. Spans are appended as they end.
    for span in reversed(_latest.copy()):
        if span.end_ns + offset < wall_ns:
            break
        recent.append(span)
    recent.reverse()
    return Recorded(_machine(), os.getpid(), offset, recent)


@functools.cache
def _machine() -> str:
    """Return the name of this machine since its last start."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else socket.gethostname()


def clock_shift_ns(recorded: Recorded, reference: Recorded) -> int:
    """Return the nanoseconds that bring the times of a process to the clock of `reference`.

    Processes of one machine share their clock; others are aligned by their wall clocks.
    """
    if recorded.machine == reference.machine:
        return 0
    return recorded.wall_offset_ns - reference.wall_offset_ns


def write_trace(path: Path, processes: Sequence[tuple[str, Recorded]]) -> None:
    """Write a file for chrome://tracing or ui.perfetto.dev, with one block of rows per process.

    `processes` are names and spans, in the order of the blocks. Times are those of the first
    process: processes of its machine share its monotonic clock, and processes of other machines are
    aligned by their wall clocks.
    """
    _, reference = processes[0]
    events: list[dict[str, Any]] = []
    numbers = itertools.count()

    for pid, (name, recorded) in enumerate(processes):
        shift_ns = clock_shift_ns(recorded, reference)
        events.append(_metadata("process_name", pid, 0, name=name))
        events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        rows = list(dict.fromkeys(span.row for span in recorded.spans))
        events += [_metadata("thread_name", pid, tid, name=row) for tid, row in enumerate(rows)]
        for span in recorded.spans:
            common = {"name": span.name, "cat": span.row, "pid": pid, "tid": rows.index(span.row)}
            start_us = (span.start_ns + shift_ns) / 1000
            end_us = (span.end_ns + shift_ns) / 1000
            if span.overlaps:
                number = next(numbers)
                events.append({**common, "ph": "b", "id": number, "ts": start_us})
                events.append({**common, "ph": "e", "id": number, "ts": end_us})
            else:
                events.append({**common, "ph": "X", "ts": start_us, "dur": end_us - start_us})

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}
