"""The comparison of engines by their rewards: its arguments, its quarters, and a run that fails."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import engines_learn

WORDS = ["model", "--server-python", "python"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "1"], "--seeds must name at least two"),
        (["--steps", "3"], "--steps must be at least 4"),
    ],
)
def test_arguments_without_a_comparison_are_refused(capsys, words, message):
    with pytest.raises(SystemExit):
        engines_learn.parse_arguments([*WORDS, *words])
    assert message in capsys.readouterr().err


def test_quarters_leave_out_the_rest():
    assert engines_learn.quarters([1, 3, 5, 5, 0, 2, 4, 4, 100]) == [2, 5, 1, 4]


def test_a_run_that_fails_shows_its_output(tmp_path, monkeypatch):
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/sh\necho there is no model >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(engines_learn, "SCRIPT", script)
    given = argparse.Namespace(model=tmp_path, steps=4)
    with pytest.raises(SystemExit, match=r"embedded, seed 1: 0 of 4 steps:\s+there is no model"):
        engines_learn.steps_of(given, "embedded", "1", tmp_path)
