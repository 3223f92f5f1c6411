"""The memory benchmark on CPU, without measurements, and its table."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import memory


@pytest.mark.parametrize("name", ["tiny", "tiny-lora"])
def test_case_has_a_prediction_for_every_phase(tmp_path: Path, name: str):
    results = memory.run_case(memory.TINY[name], tmp_path / name, torch.device("cpu"))
    assert [result["phase"] for result in results] == list(memory.PHASES)
    assert all(result["predicted"] == sum(result["parts"].values()) > 0 for result in results)
    assert {result["tokens"] for result in results} == {None, 128}


@pytest.mark.slow
def test_script_runs_one_case_in_a_process(tmp_path: Path, capsys):
    assert memory.main(["--tiny", "--cases", "tiny-vocabulary", "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "| tiny-vocabulary | load |" in output
    assert "| tiny-vocabulary | old log-probs | 128 |" in output
    assert (tmp_path / "tiny-vocabulary.json").is_file()


def test_error_is_relative_to_the_measurement():
    result = {
        "phase": "rollout",
        "tokens": None,
        "predicted": 11 * 2**30,
        "taken": 10 * 2**30,
        "outside": 2**29,
        "parts": {"pages": 11 * 2**30},
    }
    assert (
        memory.row("x", result)
        == "| x | rollout |  | 11.00 | 10.00 | +10.0% | 0.50 | pages 11.00 |"
    )


def test_unknown_case_is_rejected(capsys):
    with pytest.raises(SystemExit):
        memory.main(["--cases", "9b"])
    assert "got '9b'" in capsys.readouterr().err
