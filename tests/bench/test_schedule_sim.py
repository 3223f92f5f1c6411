"""The simulator of schedules: nothing ahead is the synchronous step, and a long tail is hidden."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import schedule_sim as sim


def test_schedules_on_a_clock():
    costs = sim.Costs(
        decode_s=1e-3,
        row_s=0.0,
        cached_token_s=0.0,
        prefill_token_s=0.0,
        token_s=1e-6,
        sync_s=0.0,
    )
    work = sim.Work(
        prompts=8,
        samples=2,
        prompt_tokens=16,
        lengths="tail:512",
        steps=20,
        warm_up=4,
        seed=0,
    )
    sync = sim.simulate(work, costs, 1, 0, "sync", 0.0)
    assert sim.simulate(work, costs, 1, 0, "timeslice", 0.0) == sync
    # A step costs the same whatever runs, so two batches in flight halve the generation.
    ahead = sim.simulate(work, costs, 1, 0, "timeslice", 1.0)
    assert 1.6 < sync.step_s / ahead.step_s < 2.2

    slow_update = replace(costs, token_s=2e-4)
    split = sim.best_split(work, slow_update, 2, "fully_async", 1.0)
    assert split.generators == 1
    assert split.trainer_idle < 0.1, "generation hides behind a slow update"
    assert split.rollout_idle > 0.3
