"""Peak memory by phase.

torch's allocator keeps a single peak. Code that resets it must do so here, where earlier peaks are
remembered.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psutil
import torch


class Peak(NamedTuple):
    """The largest memory use of a phase, in bytes."""

    allocated: int = 0  # by torch's allocator
    # of the device but not torch's, at the end of a phase: contexts, reserved memory, other
    # processes
    outside: int = 0
    host: int = 0  # of this process when a phase ended

    def most(self, other: "Peak") -> "Peak":
        return Peak(*(max(pair) for pair in zip(self, other)))


class PhasePeaks:
    """The largest peak of every phase of this process. Phases may be nested; all use one device."""

    def __init__(self) -> None:
        self.phases: dict[str, Peak] = {}
        self._open: list[int] = []  # peak of each open phase up to the last reset of torch's peak
        self._since_take = (0, 0)  # allocated and reserved, up to the last reset

    def restart(self, device: torch.device) -> None:
        """Reset torch's peaks, and remember their values."""
        if device.type != "cuda":
            return
        allocated = torch.cuda.max_memory_allocated(device)
        self._open = [max(peak, allocated) for peak in self._open]
        reserved = torch.cuda.max_memory_reserved(device)
        self._since_take = (
            max(self._since_take[0], allocated),
            max(self._since_take[1], reserved),
        )
        torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def phase(self, name: str, device: torch.device) -> Iterator[None]:
        """Count memory that is used within this context for `name`, also if it raises."""
        self.restart(device)
        self._open.append(0)
        try:
            yield
        finally:
            self.restart(device)
            host_bytes = psutil.Process().memory_info().rss
            peak = Peak(self._open.pop(), _outside(device), host_bytes)
            self.phases[name] = self.phases.get(name, Peak()).most(peak)

    def take(self, device: torch.device) -> tuple[int, int]:
        """Return the peaks of allocated and reserved bytes since the last call."""
        self.restart(device)
        peaks = self._since_take
        self._since_take = (0, 0)
        return peaks


def _outside(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


phase_peaks = PhasePeaks()
