"""Peak memory by phase, although torch has one peak: nested phases, and the metric of the step."""

import pytest
import torch

from verl.utils.devices import memory_metrics
from verl.utils.peaks import Peak, PhasePeaks

CUDA = torch.device("cuda", 0)


class Allocator:
    """Statistics of torch's allocator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: self.peak + 1)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 - self.now - 7, 1000))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.restart)

    def restart(self, device: torch.device) -> None:
        self.peak = self.now

    def take(self, peak: int, after: int = 0) -> None:
        self.peak = max(self.peak, peak)
        self.now = after


def test_each_phase_has_its_own_peak_and_the_step_the_largest(monkeypatch: pytest.MonkeyPatch):
    allocator = Allocator(monkeypatch)
    peaks = PhasePeaks()
    monkeypatch.setattr("verl.utils.devices.phase_peaks", peaks)
    allocator.take(50, 10)
    with peaks.phase("generation", CUDA):
        allocator.take(30, 10)

    with peaks.phase("update", CUDA):
        allocator.take(80, 10)
        with peaks.phase("step", CUDA):
            allocator.take(60, 10)
        allocator.take(20, 10)

    with peaks.phase("generation", CUDA):
        allocator.take(25, 10)
    allocated = {name: peak.allocated for name, peak in peaks.phases.items()}
    assert allocated == {"generation": 30, "update": 80, "step": 60}
    assert peaks.phases["update"].outside == 7
    assert peaks.phases["update"].host > 0
    metrics = memory_metrics(CUDA)
    assert metrics["perf/max_memory_allocated_gb"] == 80 / 2**30

    assert metrics["perf/max_memory_reserved_gb"] == 81 / 2**30
    assert memory_metrics(CUDA)["perf/max_memory_allocated_gb"] == 10 / 2**30
    of_all = memory_metrics(CUDA, lambda number: max(number, 70))
    assert of_all["perf/max_memory_allocated_gb"] == 70 / 2**30


def test_a_phase_that_fails_is_reported_too():
    peaks = PhasePeaks()
    with pytest.raises(ValueError), peaks.phase("update", torch.device("cpu")):
        raise ValueError
    assert peaks.phases["update"] == Peak(0, 0, peaks.phases["update"].host)
    assert peaks.phases["update"].host > 0
