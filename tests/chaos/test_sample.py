"""A sample of the campaign that `make chaos` runs."""

from pathlib import Path

import pytest

from tests.chaos.campaign import FAULTS, Campaign


@pytest.mark.slow
def test_a_run_survives_a_fault_at_a_random_moment(tmp_path: Path):
    (fault,) = [fault for fault in FAULTS if fault.name == "kill -9 and a torn file"]
    row = Campaign(tmp_path, seed=1).run(fault, "alone", tries=1)
    assert row.failures == []
    assert row.survived == 1
