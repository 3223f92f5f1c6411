"""Peaks of memory by phase. torch's allocator keeps one peak, so whoever starts it again does it
here, where the ones before are remembered."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import psutil
import torch


class Peak(NamedTuple):
    """The most that a phase took, in bytes."""

    allocated: int = 0  # by torch's allocator
    # of the device beside it when a phase ended: contexts, reserved memory, other processes
    outside: int = 0
    host: int = 0  # of this process when a phase ended

    def most(self, other: "Peak") -> "Peak":
        return Peak(*(max(pair) for pair in zip(self, other)))


class PhasePeaks:
    """The largest peak of every phase of this process. Phases may lie within one another; they are
    of one device."""

    def __init__(self) -> None:
        self.phases: dict[str, Peak] = {}
        self._open: list[int] = []  # allocated by each open phase, as far as torch has forgotten it
        self._untold = (0, 0)

    def restart(self, device: torch.device) -> None:
        """Let torch's peaks begin anew."""
        if device.type != "cuda":
            return
        allocated = torch.cuda.max_memory_allocated(device)
        self._open = [max(peak, allocated) for peak in self._open]
        self._untold = (
            max(self._untold[0], allocated),
            max(self._untold[1], torch.cuda.max_memory_reserved(device)),
        )
        torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def phase(self, name: str, device: torch.device) -> Iterator[None]:
        """What is taken within counts for `name`, also where it ends in an error."""
        self.restart(device)
        self._open.append(0)
        try:
            yield
        finally:
            self.restart(device)
            peak = Peak(self._open.pop(), _outside(device), psutil.Process().memory_info().rss)
            self.phases[name] = self.phases.get(name, Peak()).most(peak)

    def take(self, device: torch.device) -> tuple[int, int]:
        """Peaks of allocated and reserved bytes since the last call."""
        self.restart(device)
        told = self._untold
        self._untold = (0, 0)
        return told


def _outside(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


phase_peaks = PhasePeaks()
