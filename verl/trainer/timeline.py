"""The timeline of a step: the driver's phases and calls, and the methods of every rank."""

from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from verl.utils.timeline import Recorded, clock_shift_ns, recorded_since, write_trace

_MOST_SPANS = 2000  # of a process; the longest stay


def write_timeline(folder: Path, step: int, groups: Iterable[Any], since_wall_ns: int) -> None:
    """Write a step as a Chrome trace into the folder of checkpoints.

    Args:
        folder: of checkpoints.
        step: its number.
        groups: the workers.
        since_wall_ns: the start of the step.
    """
    path = folder / "timeline" / f"global_step_{step}.json"
    write_trace(path, spans_of_processes(groups, since_wall_ns))


def spans_of_processes(groups: Iterable[Any], since_wall_ns: int) -> list[tuple[str, Recorded]]:
    """Return the driver's phases and calls, and the methods of every rank, process by process."""
    ours = recorded_since(since_wall_ns)
    driver = (ours.machine, ours.pid)
    names: dict[tuple[str, int], list[str]] = {driver: ["driver"]}
    found: dict[tuple[str, int], Recorded] = {driver: ours}
    for group in dict.fromkeys(groups):
        for rank, recorded in enumerate(group.recent_spans(since_wall_ns)):
            key = (recorded.machine, recorded.pid)
            names.setdefault(key, []).append(f"{group.role} {rank}")
            found.setdefault(key, recorded)

    processes = []
    for key, recorded in found.items():
        roles = ", ".join(names[key])
        processes.append((f"{roles} (pid {recorded.pid})", recorded))
    return processes


def lanes_of(processes: Sequence[tuple[str, Recorded]], started_ns: int) -> list[dict[str, Any]]:
    """Return the spans of each process, in microseconds from the start of the step."""
    _, reference = processes[0]
    origin_ns = started_ns - reference.wall_offset_ns
    lanes = []
    for name, recorded in processes:
        shift_ns = clock_shift_ns(recorded, reference) - origin_ns
        kept = recorded.spans
        if len(kept) > _MOST_SPANS:
            kept = sorted(kept, key=lambda span: span.start_ns - span.end_ns)[:_MOST_SPANS]
        spans = []
        for label, row, start_ns, end_ns, _ in kept:
            start_us = (start_ns + shift_ns) // 1000
            spans.append((label, row, start_us, (end_ns + shift_ns) // 1000))
        spans.sort(key=itemgetter(2))
        lanes.append({"name": name, "spans": spans})
    return lanes
