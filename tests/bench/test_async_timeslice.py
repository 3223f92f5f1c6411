"""The benchmark of asynchronous training on CPU: equal work on two ranks, and its tables."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import async_timeslice
from timeslice_report import IDLE, imposed_tokens, measured, read_lines

from tests.cases import cases
from tests.launches import launch

SHORT = ["--tiny", "--warm-up", "1", "--counted", "2", "--drained", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Return a folder for results with the model in it."""
    out = tmp_path_factory.mktemp("timeslice")
    assert async_timeslice.main(["--only", "model", "--tiny", "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize(
    "schedule", cases(["sync", "fully_async"], quick=lambda schedule: schedule == "fully_async")
)
def test_two_ranks_train_on_responses_of_the_imposed_lengths(model, schedule):
    words = [*SHORT, "--ranks", "2", "--out", str(model)]
    done = launch(2, async_timeslice.main, ["--only", schedule, *words])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    given = async_timeslice.parse_arguments(words)
    result = measured(given, read_lines(model / schedule / "run" / "metrics.jsonl"))
    assert result is not None
    assert len(result.steps) == 4
    assert result.counted == 2
    assert result.tokens_of_the_run == imposed_tokens(given)
    assert sorted(result.idle) == (sorted(IDLE) if schedule == "fully_async" else [])


def line(step_s: float, **more: float) -> dict[str, float]:
    return {
        "timing_s/gen": step_s / 2,
        "timing_s/update_actor": step_s / 2,
        "timing_s/step": step_s,
        "perf/total_num_tokens": 300,
        "rollout/decode_steps": 96,
        "rollout/generated_tokens": 200,
        "rollout/prefill_tokens": 64,
        "prompt_length/mean": 16,
        **more,
    }


def test_report_counts_the_steps_that_ended(tmp_path, capsys):
    given = async_timeslice.parse_arguments([*SHORT, "--ranks", "2", "--out", str(tmp_path)])
    idle = {"trainer/idle_ratio": 0.25, "rollouter/idle_ratio": 0.5}
    ours = [line(3.0, **idle), line(1.0, **idle)]
    async_timeslice.report(given, {"sync": [line(4.0), *3 * [line(2.0)]], "fully_async": ours})

    output = capsys.readouterr().out
    assert "| steps counted, of those that ended | 2, 4 | 1, 2 |" in output
    assert "| trainer/idle_ratio |  | 25% |" in output
    assert "fully_async trains 2.00x the tokens a second (1 and 2 steps counted)" in output
    assert "| measured | 1.00 |  | 25% | 50% |" in output
    assert "simulated, fit of `verl plan` to 3 steps" in output


def test_schedule_without_a_counted_step_is_left_out(tmp_path, capsys):
    given = async_timeslice.parse_arguments([*SHORT, "--out", str(tmp_path)])
    async_timeslice.report(given, {"sync": [line(4.0), line(2.0)], "fully_async": [line(3.0)]})
    output = capsys.readouterr().out
    assert "|  | sync |" in output
    assert "fully_async" not in output


def test_one_rank_has_to_learn(capsys):
    with pytest.raises(SystemExit):
        async_timeslice.parse_arguments(["--ranks", "2", "--generators", "2"])
    assert "--generators must be from 1 to 1" in capsys.readouterr().err
