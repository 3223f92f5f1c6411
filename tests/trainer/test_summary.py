"""The summary at the end of a run, and the command that it prints."""

import resource
from pathlib import Path

from tests.trainer.runs import run
from verl.cli.main import main
from verl.trainer.summary import RunSummary


def test_the_summary_has_reward_and_time():
    summary = RunSummary()
    assert summary.lines() == []
    summary.add(0, {"val-core/toy/reward/mean@8": 0.25})
    summary.add(1, {"critic/score/mean": 0.1, "timing_s/step": 2.0, "timing_s/gen": 1.5})
    summary.add(1, {"timing_s/reward": 0.4, "timing_s/rm": 0.4})  # the second within the first
    scores = {"critic/score/mean": 0.9, "val-core/toy/reward/mean@8": 0.75}
    summary.add(2, {**scores, "timing_s/step": 2.0, "timing_s/gen": 0.5, "timing_s/testing": 9.0})
    assert summary.lines() == [
        "critic/score/mean: 0.1000 (step 1) to 0.9000 (step 2)",
        "val-core/toy/reward/mean@8: 0.2500 (step 0) to 0.7500 (step 2)",
        "Time: 2 steps took 4.0 s (gen 50%, reward 10%)",
    ]


def test_the_command_that_a_run_prints_shows_its_worst_answers(tmp_path: Path, capfd):
    assert run(tmp_path) == 0
    out = capfd.readouterr().out
    (command,) = [
        line.partition("verl view ")[2] for line in out.splitlines() if "verl view" in line
    ]
    assert command == str(tmp_path)
    assert main(["view", command, "--export", str(tmp_path / "run.html")]) == 0
    page = (tmp_path / "run.html").read_text()
    assert '"samples/0/2"' in page
    assert '"sample/0/2/15"' in page

    before = (tmp_path / "run.html").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        assert main(["view", command, "--export", str(tmp_path / "run.html")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "run.html").read_bytes() == before
    assert f"'{tmp_path}/run.html'. Raise the limit on the size of a file" in capfd.readouterr().err
