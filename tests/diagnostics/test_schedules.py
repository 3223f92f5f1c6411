"""The simulator of schedules, and the split that the times of a run propose."""

import json
import random
from dataclasses import replace

import pytest

from tests.trainer.runs import run
from verl.diagnostics.plan import main
from verl.diagnostics.proposal import MeasuredSteps
from verl.diagnostics.schedules import Costs, Work, all_schedules, best_split, simulate

COSTS = Costs(
    decode_s=0.01, row_s=1e-4, cached_token_s=0.0, prefill_token_s=1e-3, token_s=3e-3, sync_s=0.05
)


def tail(count: int) -> list[int]:
    """Return lengths of which a few are far longer than the others."""
    rng = random.Random(0)
    return [400 if rng.random() < 0.1 else rng.randint(20, 60) for _ in range(count)]


def test_a_synchronous_step_takes_the_sum_of_its_phases():
    work = Work(prompts=2, samples=2, prompt_tokens=10, lengths=[30, 30, 30, 30])
    result = simulate(work, COSTS, 1, 0, "sync", 0.0)
    decode = 30 * (COSTS.decode_s + 4 * COSTS.row_s)
    update = 4 * 40 * COSTS.token_s
    prefill = 2 * 10 * COSTS.prefill_token_s
    assert result.step_s == pytest.approx(prefill + decode + update + COSTS.sync_s)


def test_long_tails_are_worth_a_time_slice():
    quick = replace(COSTS, token_s=1e-4, prefill_token_s=1e-5)
    uneven = all_schedules(Work(8, 4, 16, tail(960)), quick, 1, 1.0)
    assert uneven["sync"].step_s > 1.2 * uneven["timeslice"].step_s
    assert set(uneven) == {"sync", "timeslice"}, "one device cannot be split"

    # Where a step costs as much as its rows, a tail that runs alone wastes nothing.
    by_rows = replace(quick, decode_s=0.0, prefill_token_s=0.0)
    equal = all_schedules(Work(8, 4, 16, [50]), by_rows, 1, 1.0)
    assert equal["timeslice"].step_s == pytest.approx(equal["sync"].step_s, rel=0.1)


def test_nothing_ahead_is_the_synchronous_step():
    work = Work(8, 2, 16, tail(960), steps=20, warm_up=4)
    sync = simulate(work, COSTS, 1, 0, "sync", 0.0)
    assert simulate(work, COSTS, 1, 0, "timeslice", 0.0) == sync


def test_a_split_hides_generation_behind_a_slow_update():
    work = Work(8, 2, 16, tail(960), steps=20, warm_up=4)
    split = best_split(work, replace(COSTS, token_s=2e-2), 2, "fully_async", 1.0)
    assert split.generators == 1
    assert split.trainer_idle < 0.1
    assert split.rollout_idle > 0.3


def test_measured_steps_give_back_the_costs_that_made_them():
    """Simulated steps of several sizes are measured, and their split is the simulator's own."""
    measured = MeasuredSteps(prompts=8, samples=4, ranks=4)
    lengths = tail(32 * 8)
    for step in range(8):
        own = lengths[32 * step : 32 * (step + 1)]
        decode_steps = max(own)
        gen_s = decode_steps * COSTS.decode_s + sum(own) / 4 * COSTS.row_s
        gen_s += 8 * 16 / 4 * COSTS.prefill_token_s
        tokens = sum(own) + 32 * 16
        update_s = tokens * COSTS.token_s / 4
        metrics = {
            "rollout/decode_steps": 4.0 * decode_steps,
            "rollout/generated_tokens": float(sum(own)),
            "rollout/prefill_tokens": 8.0 * 16,
            "timing_s/gen": gen_s,
            "timing_s/sync_weights": COSTS.sync_s,
            "timing_s/step": gen_s + update_s + COSTS.sync_s,
            "perf/total_num_tokens": float(tokens),
            "prompt_length/mean": 16.0,
        }
        measured.add(metrics, own)

    proposal = measured.proposal(1.0)
    expected = all_schedules(Work(8, 4, 16, lengths), COSTS, 4, 1.0)
    for name, result in expected.items():
        ours = proposal.results[name]
        assert ours.step_s == pytest.approx(result.step_s, rel=0.1)
    assert proposal.best == min(expected, key=lambda name: expected[name].step_s)
    assert proposal.results[proposal.best].generators == expected[proposal.best].generators
    assert f"{proposal.num_steps} measured steps" in proposal.line()


def test_a_run_proposes_a_schedule_and_so_does_the_plan_of_its_record(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("verl.trainer.proposer.PROPOSAL_STEPS", 4)
    monkeypatch.setattr("verl.diagnostics.proposal.Proposal.best", "timeslice")
    assert run(tmp_path, "trainer.max_steps=5", "trainer.save_freq=-1") == 0
    logged = capfd.readouterr().out
    assert logged.count("schedules: after 3 measured steps") == 1
    assert f"plan --run {tmp_path}" in logged

    assert main(["--run", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    assert "Schedules on 1 rank, simulated from 4 measured steps" in printed
    assert "fully_async, shared ranks" in printed
    assert "Proposed: trainer.mode=" in printed

    keys = ["data.dataset_name=toy", "data.train_batch_size=4", "actor_rollout_ref.model.path=toy"]
    assert main(["--json", "--run", str(tmp_path), *keys]) == 0
    printed = capfd.readouterr().out
    report = json.loads(printed[printed.index("{\n") :])  # behind the log
    assert report["proposal"]["num_steps"] == 4
    assert report["phases"]


def test_only_synchronous_steps_show_the_times(tmp_path, capfd):
    assert run(tmp_path, "trainer.mode=fully_async", "data.train_batch_size=3") == 0
    assert main(["--run", str(tmp_path)]) == 1
    assert "has trainer.mode=fully_async. Give a run" in capfd.readouterr().err

    file = tmp_path / "records" / "run.json"
    record = json.loads(file.read_text())
    del record["config"]["trainer"]["mode"]  # fine-tuning has none
    file.write_text(json.dumps(record))
    assert main(["--run", str(tmp_path)]) == 1
    assert "has no trainer.mode, as fine-tuning" in capfd.readouterr().err


def test_lending_takes_the_wait_of_the_trainers():
    work = Work(8, 4, 16, tail(960))
    costs = replace(COSTS, prefill_token_s=0.0)
    apart = simulate(work, costs, 2, 2, "fully_async", 1.0)
    lent = simulate(work, costs, 2, 2, "lending", 1.0)
    assert apart.trainer_idle > 0
    assert lent.trainer_idle == 0
    assert lent.step_s < apart.step_s
    moved = simulate(work, replace(costs, prefill_token_s=1e-3), 2, 2, "lending", 1.0)
    assert moved.step_s > lent.step_s, "samples that change their device are computed anew"
