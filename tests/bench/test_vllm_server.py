"""The mode of `bench/vllm_server.py` that hands over weights and trains nothing."""

import argparse
import json
import sys
from pathlib import Path
from weakref import WeakSet

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import gpu_step
import vllm_server
from rollout_models import SHAPES

from verl.engine import base


def test_hand_overs_leave_no_room_for_moments(tmp_path, monkeypatch):
    """Run steps with the embedded engine: the log-probs are compared, and nothing is trained."""
    arguments = argparse.Namespace(
        micro_tokens=None,
        no_checkpointing=False,
        prompts=2,
        samples=2,
        prompt_tokens=8,
        new_tokens=4,
        steps=3,
    )
    device = torch.device("cpu")
    shape = SHAPES["tiny"]
    gpu_step.write_model(tmp_path / "model", shape, device)
    trainer = vllm_server.HandOvers(
        gpu_step.make_config(arguments, tmp_path, device),
        reward_fn=gpu_step.even_share,
        val_reward_fn=gpu_step.even_share,
        train_dataset=gpu_step.RandomPrompts(4, 8, shape["vocab_size"]),
    )

    monkeypatch.setattr(base, "_engines", WeakSet())  # without those of other tests
    trainer.init_workers()
    assert trainer.actor_wg.worker.engine._bytes_to_come() == 0
    trainer.fit()

    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    assert len(steps) == 3
    for step in steps:
        assert step["training/rollout_probs_diff_mean"] < 1e-3
        assert "actor/grad_norm" not in step
