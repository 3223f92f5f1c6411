"""The agreement benchmark: its numbers for a known mismatch, and the copy with larger heads."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import tiny_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from widen_heads import widen_heads

agreement = importlib.import_module("agreement")


def test_table_shows_a_known_mismatch():
    rollout = -torch.rand(8, 500, dtype=torch.float64)
    trainer = rollout + 0.1
    trainer[0, :2] -= 0.3
    mean, p99, largest, ratio, kl, log_prob = agreement.describe(trainer, rollout).split(" | ")
    assert float(mean.split(" ± ")[0]) == pytest.approx(0.1 + 2 * 0.1 / 4000, abs=1e-3)
    assert (float(p99), float(largest)) == (0.1, 0.2)
    assert float(ratio) == pytest.approx(1.1052, abs=3e-4)
    assert float(kl) == pytest.approx(0.00517, abs=2e-5)
    assert float(log_prob) == pytest.approx(rollout.mean().item(), abs=1e-3)


def test_embedded_engine_agrees_with_the_trainer_in_fp32(capsys, monkeypatch, tmp_path):
    words = (
        "--device cpu --dtype float32 --engines ours --gain 10 --prompts 3 --samples 2 "
        "--new-tokens 12 --out"
    )
    monkeypatch.setattr(sys, "argv", ["agreement.py", *words.split(), str(tmp_path)])
    agreement.main()
    cells = capsys.readouterr().out.splitlines()[-1].split(" | ")
    assert cells[0] == "| ours"
    assert 0 < float(cells[3]) < 1e-4
    assert -5 < float(cells[6].rstrip(" |")) < -0.5, "uniform probabilities would always agree"


def test_larger_heads_compute_the_same_function():
    torch.manual_seed(0)
    model: Any = tiny_model("llama")
    wide = widen_heads(model, wide=4 * model.config.head_dim)
    ids = torch.randint(model.config.vocab_size, (2, 20))
    assert wide.config.head_dim == 4 * model.config.head_dim
    with torch.no_grad():
        torch.testing.assert_close(wide(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
