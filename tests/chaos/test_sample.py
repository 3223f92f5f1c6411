"""A sample of the campaign that `make chaos` runs."""

import time
from pathlib import Path

import pytest

from tests.chaos import machines
from tests.chaos.campaign import FAULTS, Campaign
from tests.chaos.flat import Usage, growth, too_much
from tests.chaos.machines import TwoMachinesJob


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"), [("kill -9 and a torn file", "alone"), ("kill -9", "agents")]
)
def test_a_run_survives_a_fault_at_a_random_moment(tmp_path: Path, name: str, backend: str):
    (fault,) = [each for each in FAULTS if each.name == name and backend in each.backends]
    row = Campaign(tmp_path, seed=1, usual_s=1.0).run(fault, backend, tries=1)
    assert row.failures == []
    assert row.survived == 1


@pytest.mark.slow
@pytest.mark.skipif(not machines.are_allowed(), reason="network namespaces are not allowed here")
def test_a_cut_link_between_two_machines_is_named_in_time(tmp_path: Path):
    keys = ["trainer.max_steps=1000", "trainer.save_freq=-1", "trainer.deadline_s=6"]
    job = TwoMachinesJob("torchrun", tmp_path / "run", *keys)
    while not job.has_begun() and job.process.poll() is None:
        time.sleep(0.02)
    moment = time.monotonic()
    job.machines.cut_link()
    assert job.end() == 1
    assert job.left == []

    seconds = job.error_after(moment)
    assert seconds is not None
    assert seconds < 6 + 30, job.lines  # a busy machine is slow
    text = "\n".join(line for _, line in job.lines)
    assert "rank 1" in text
    assert "does not answer" in text


def test_growth_is_found_after_the_warm_up():
    steps = list(range(0, 1000, 50))
    flat = Usage(400, 6, 8, 1, 0, 0, 50)
    filling = [Usage(min(400, 300 + step), 6, 8, 1, 0, 0, 50) for step in steps]
    leaking = [Usage(400, 6 + step / 100, 8, 1, 0, 0, 50) for step in steps]
    assert too_much(growth(steps, [flat] * 20)) == []
    assert too_much(growth(steps, filling)) == []
    assert too_much(growth(steps, leaking)) == ["open_files grows by 9.5 (allowed: 3)"]
