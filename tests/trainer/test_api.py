"""The facade for programs and notebooks trains like the entry point."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import verl
from tests.trainer.programs import ASKED, PPO, TOY, by_transformers, facade
from tests.trainer.runs import same_bits, start_trainer, step_lines, weights, without_times
from verl.models.critic import CriticModel
from verl.trainer import PPOTrainer, RLTrainer
from verl.utils.errors import ConfigError, DataError


def entry_point(folder: Path, *overrides: str) -> Any:
    trainer = start_trainer(folder, "trainer.save_freq=2", *overrides)
    trainer.fit()
    return trainer


def test_training_gives_the_bits_of_the_entry_point_after_any_other_calls(tmp_path, capsys):
    trainer = facade(tmp_path / "ours", **PPO)
    before = trainer.rollout(ASKED, greedy=True)
    metrics = trainer.train(micro_batch_size=2, gradient_accumulation_steps=4)
    assert "I Device: cpu" in capsys.readouterr().out, "the log of the commands"
    assert re.fullmatch(r"step 2: Actor loss: .*\(\d\d+ metrics; dict.*\)", repr(metrics))
    sizes = ["actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    sizes += [
        f"{role}.ppo_micro_batch_size_per_gpu=2" for role in ("actor_rollout_ref.actor", "critic")
    ]
    entry_point(tmp_path / "theirs", "algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", *sizes)

    assert without_times(step_lines(tmp_path / "ours")) == without_times(
        step_lines(tmp_path / "theirs")
    )
    for role in ("actor", "critic"):
        assert same_bits(weights(tmp_path / "ours", 2, role), weights(tmp_path / "theirs", 2, role))
    assert metrics["training/global_step"] == 2
    assert metrics == trainer.metrics

    state = trainer.ppo.actor_wg.worker.engine.hf_model.state_dict()
    assert before == by_transformers()
    assert trainer.rollout(ASKED, greedy=True) == by_transformers(state) != before, (
        "the weights of now"
    )
    critic = trainer.critic.model
    assert isinstance(critic, CriticModel)
    assert isinstance(critic.value_head, nn.Module)
    saved = weights(tmp_path / "ours", 2, "critic")
    assert sum(tensor.numel() for tensor in saved.values()) == sum(
        p.numel() for p in critic.parameters()
    )
    with pytest.raises(ConfigError, match=r"run already, to step 2 of 2.* goes on from the newest"):
        trainer.train()


def test_a_second_train_without_a_checkpoint_would_begin_anew(tmp_path):
    trainer = facade(tmp_path, **{"trainer.save_freq": -1, "trainer.max_steps": 1})
    trainer.train()
    with pytest.raises(ConfigError, match=r"step 1 of 1.* begins anew, because no checkpoint"):
        trainer.train()


def test_a_run_that_only_validates_returns_its_metrics(tmp_path):
    trainer = facade(tmp_path, val_only=True)
    metrics = trainer.train()
    assert 0 <= metrics["val-core/toy/reward/mean@8"] <= 1
    assert trainer.metrics == metrics
    assert repr(metrics).startswith(
        "no step was trained; validation: val-core/toy/reward/mean@8: 0."
    )


def test_amp_computes_in_bfloat16_over_float32_parameters(tmp_path):
    trainer = verl.train(facade(tmp_path / "ours").config, amp=True)
    assert isinstance(trainer, RLTrainer)
    key = "actor_rollout_ref.actor.fsdp_config.compute_dtype"
    entry_point(tmp_path / "theirs", f"{key}=bfloat16")
    entry_point(tmp_path / "exact")
    ours, theirs, exact = (weights(tmp_path / name, 2) for name in ("ours", "theirs", "exact"))
    assert same_bits(ours, theirs)
    assert not same_bits(ours, exact)
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}


def test_settings_of_models_are_fixed_once_they_are_loaded(tmp_path):
    trainer = facade(tmp_path)
    trainer.rollout(ASKED[:1])
    with pytest.raises(
        ConfigError, match=r"amp=True changes .*compute_dtype, but the models are loaded already"
    ):
        trainer.train(amp=True)


def test_custom_data_and_a_custom_reward_need_no_configuration(tmp_path):
    """Reward longer responses, on prompts that are in no file."""

    class Sums:
        def __len__(self):
            return 8

        def __getitem__(self, row):
            return {"raw_prompt_ids": [3 + row, 5, 7], "raw_prompt": [], "index": row}

    def reward(data, return_dict=False):
        mask = data.batch["response_mask"]
        scores = torch.zeros(mask.shape)
        scores[torch.arange(len(mask)), mask.sum(-1) - 1] = mask.sum(-1).float()
        return {"reward_tensor": scores, "reward_extra_info": {}} if return_dict else scores

    keys = {**TOY, "data": {"train_batch_size": 4}, "actor_rollout_ref.model.path": "toy"}
    parts = {"train_dataset": Sums(), "reward_fn": reward, "val_reward_fn": reward}
    trainer = RLTrainer(
        keys,
        algorithm={"adv_estimator": "grpo"},
        trainer={"default_local_dir": str(tmp_path)},
        **parts,
    )
    metrics = trainer.train()
    assert metrics["critic/score/mean"] == metrics["response_length/mean"]
    validated = {**keys, "algorithm.adv_estimator": "grpo", "trainer.test_freq": 1}
    with pytest.raises(
        ConfigError, match="has no validation split. Set data.val_files, or give a val_dataset"
    ):
        PPOTrainer(validated, **parts)
    by_class = PPOTrainer(validated, **parts, val_dataset=Sums())
    assert len(by_class.train_loader) == len(by_class.val_loader) * 2
    with pytest.raises(DataError, match="No training data"):
        PPOTrainer(keys | {"algorithm.adv_estimator": "grpo"})
    batch = trainer.rollout(ASKED, as_batch=True)
    assert trainer.compute_reward(batch).tolist() == batch.batch["response_mask"].sum(-1).tolist()
    with pytest.raises(ConfigError, match="reads prompts for texts, but the responses are a batch"):
        trainer.compute_reward(batch, ASKED)
    with pytest.raises(ConfigError, match="reward_fn reads batches of tokens"):
        trainer.compute_reward(["a"])
