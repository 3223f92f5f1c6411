"""Whole runs with adapters, from the command line."""

import torch
from safetensors.torch import load_file

from tests.trainer.runs import run, same_bits, step_lines, without_times

LORA = ["actor_rollout_ref.model.lora_rank=16", "actor_rollout_ref.model.lora_alpha=32"]
RUN = [
    *LORA,
    'actor_rollout_ref.model.target_modules=["q_proj","v_proj","gate_proj","up_proj","down_proj"]',
    "actor_rollout_ref.actor.optim.lr=5e-3",
    "actor_rollout_ref.rollout.n=12",
    "data.train_batch_size=8",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
]


def adapters(folder, step: int) -> dict[str, torch.Tensor]:
    return load_file(
        folder / f"global_step_{step}" / "actor" / "lora_adapter" / "adapter_model.safetensors"
    )


def test_a_toy_run_learns_and_its_kl_starts_at_zero(tmp_path):
    assert run(tmp_path, *RUN, "trainer.max_steps=7", base=["data.dataset_name=toy"]) == 0
    lines = step_lines(tmp_path)
    rewards = [line["critic/score/mean"] for line in lines]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
    assert lines[0]["actor/kl_loss"] == 0.0
    assert lines[-1]["actor/kl_loss"] > 0.0
    assert max(line["training/rollout_probs_diff_max"] for line in lines) < 1e-3


def test_a_resumed_run_has_the_same_bits(tmp_path):
    small = [
        *RUN,
        "actor_rollout_ref.rollout.n=4",
        "data.train_batch_size=4",
        "trainer.save_freq=2",
    ]
    base = ["data.dataset_name=toy"]
    assert run(tmp_path / "whole", *small, "trainer.max_steps=4", base=base) == 0

    assert run(tmp_path / "cut", *small, "trainer.max_steps=2", base=base) == 0
    assert run(tmp_path / "cut", *small, "trainer.max_steps=4", base=base) == 0
    assert same_bits(adapters(tmp_path / "whole", 4), adapters(tmp_path / "cut", 4))
    assert not same_bits(adapters(tmp_path / "whole", 4), adapters(tmp_path / "whole", 2))
    assert without_times(step_lines(tmp_path / "cut")) == without_times(
        step_lines(tmp_path / "whole")
    )


def test_a_changed_adapter_scale_is_rejected_on_resume(tmp_path, capfd):
    assert run(tmp_path, *RUN, "trainer.max_steps=1", "trainer.save_freq=1") == 0
    other = "actor_rollout_ref.model.lora_alpha=999"
    assert run(tmp_path, *RUN, "trainer.max_steps=2", "trainer.save_freq=1", other) == 1
    assert (
        "were trained with lora_alpha=32, this run has 999. Set lora_alpha=32."
        in capfd.readouterr().err
    )


def test_a_missing_module_is_reported_before_the_first_step(tmp_path, capfd):
    wrong = 'actor_rollout_ref.model.target_modules=["q_prj"]'
    assert run(tmp_path, *LORA, wrong) == 1
    assert "no module named 'q_prj'. Nearest: q_proj" in capfd.readouterr().err
