"""DAPO: which prompts count, dynamic sampling and its limit, resume, and the recipe's old names."""

import runpy
import sys
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.runs import (
    run,
    same_bits,
    start_trainer,
    step_lines,
    weights,
    without_times,
)
from verl.protocol import DataProto
from verl.trainer.dapo import DAPOTrainer, joined, rows_that_differ
from verl.utils.errors import ConfigError, DataError

ACTOR = "actor_rollout_ref.actor"
FILTER = "algorithm.filter_groups"
DAPO = [f"{FILTER}.enable=True", f"{ACTOR}.clip_ratio_high=0.28", "trainer.max_steps=4"]


def scored_batch(scores: list[float], uids: list[str], dropped: tuple[int, ...] = ()) -> DataProto:
    mask = torch.ones(len(scores), 2, dtype=torch.int64)
    mask[list(dropped)] = 0
    columns = {
        "token_level_scores": torch.tensor([[0.0, score] for score in scores]),
        "response_mask": mask,
    }
    extra = {
        "uid": np.array(uids, dtype=object),
        "acc": np.array([score > 0.5 for score in scores], dtype=object),
    }
    return DataProto.from_dict(
        tensors=columns, non_tensors=extra, meta_info={"reward_fields": ["acc"]}
    )


def test_prompts_with_equal_rewards_are_identified():
    batch = scored_batch([0.0, 1.0, 0.6, 0.9, 1.0, 1.0], ["a", "a", "b", "b", "c", "c"])
    assert rows_that_differ(batch, "score").tolist() == [True, True, True, True, False, False]
    assert rows_that_differ(batch, "seq_final_reward").tolist() == [True] * 4 + [False] * 2
    assert rows_that_differ(batch, "acc").tolist() == [True, True, False, False, False, False]
    dropped = scored_batch([0.0, 1.0, 1.0, 0.5, 0.5, 0.0], ["a"] * 3 + ["b"] * 3, dropped=(0, 5))
    assert not rows_that_differ(dropped, "score").any(), (
        "a reward that could not be had is no difference"
    )
    with pytest.raises(ConfigError, match=r"metric='accuracy'.*score, acc"):
        rows_that_differ(batch, "accuracy")


def test_the_filter_metric_needs_one_value_per_response():
    batch = scored_batch([0.0, 1.0], ["a", "a"])
    batch.non_tensor_batch["acc"] = np.array(
        [torch.tensor(1.0), torch.tensor(1.0), None], dtype=object
    )[:-1]
    assert not rows_that_differ(batch, "acc").any()
    batch.non_tensor_batch["acc"] = np.array([["1"], ["2"], None], dtype=object)[:-1]
    with pytest.raises(
        ConfigError,
        match=r"metric='acc' must be a field of one number or text .*\['1'\] of type list",
    ):
        rows_that_differ(batch, "acc")


def test_batches_with_different_reward_fields_join():
    one = scored_batch([0.0], ["a"])
    other = scored_batch([1.0], ["b"])
    other.non_tensor_batch["note"] = np.array(["x"], dtype=object)
    other.meta_info["reward_fields"] = ["acc", "note"]
    whole = joined([one, other])
    assert whole.non_tensor_batch["note"].tolist() == [None, "x"]
    assert whole.meta_info["reward_fields"] == ["acc", "note"]


class Watched(DAPOTrainer):
    """Record the batch that every step trained on, and the prompts that it drew."""

    def collect(self, prompts, first_row=0):
        batch = super().collect(prompts, first_row)
        self.batches = [*getattr(self, "batches", []), batch]
        return batch


def test_a_dapo_batch_is_full_of_prompts_with_unequal_rewards(tmp_path):
    trainer = start_trainer(tmp_path, *DAPO, kind=Watched)
    trainer.fit()
    lines = step_lines(tmp_path)

    for batch, line in zip(trainer.batches, lines, strict=True):
        assert len(batch) == 16
        assert len(set(batch.non_tensor_batch["uid"])) == 4
        assert rows_that_differ(batch, "score").all()
        assert 0 < line["train/kept_prompts"] <= 1

    rounds = [line["train/num_gen_batches"] for line in lines]
    assert max(rounds) > 1, "some prompts of the toy set have no spread"
    assert trainer.train_loader.state_dict()["epoch"] == int(sum(rounds)) // 2, (
        "two batches an epoch, counted all"
    )
    newest_batches = np.cumsum(rounds).astype(int) - 1  # counted from 0
    assert [line["training/epoch"] for line in lines] == (newest_batches // 2).tolist()
    later = next(batch for batch, number in zip(trainer.batches, rounds) if number > 1)
    numbers = [int(uid.split("-")[1]) for uid in later.non_tensor_batch["uid"]]
    assert max(numbers) >= 4, "further prompts have numbers, and with them noise, of their own"


def test_a_dapo_run_resumes_with_the_same_bits(tmp_path):
    """Restore the loader position, which counts the prompts that dynamic sampling drew."""
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    assert run(whole, *DAPO, "trainer.save_freq=2") == 0
    assert run(cut, *DAPO, "trainer.save_freq=2", "trainer.max_steps=2", base=None) == 0
    assert run(cut, *DAPO, "trainer.save_freq=2") == 0
    assert same_bits(weights(whole, 4), weights(cut, 4))
    assert without_times(step_lines(whole))[2:] == without_times(step_lines(cut))[2:]


def alike(data: DataProto, return_dict: bool = False) -> Any:
    scores = torch.zeros(data.batch["response_mask"].shape)
    return {"reward_tensor": scores, "reward_extra_info": {}} if return_dict else scores


def test_the_limit_of_dynamic_sampling(tmp_path):
    bound = [*DAPO, f"{FILTER}.max_num_gen_batches=2", "trainer.max_steps=1"]
    stopped = start_trainer(tmp_path / "error", *bound, reward_fn=alike, val_reward_fn=alike)
    with pytest.raises(
        DataError, match=r"2 batches of prompts gave 0 .*4 are wanted.*on_exhausted=fill"
    ):
        stopped.fit()

    filled = start_trainer(
        tmp_path / "fill",
        *bound,
        f"{FILTER}.on_exhausted=fill",
        reward_fn=alike,
        val_reward_fn=alike,
    )
    filled.fit()

    (line,) = step_lines(tmp_path / "fill")
    assert (line["train/num_gen_batches"], line["train/kept_prompts"]) == (2, 0)
    assert line["actor/grad_norm"] == 0


@pytest.mark.parametrize("name", ["dapo.main_dapo", "entropy.main_entropy"])
def test_old_names_of_recipes_run_the_same_program(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [name, *DAPO, "--cfg", "job"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"recipe.{name}", run_name="__main__")
    assert ended.value.code == 0
    assert "clip_ratio_high: 0.28" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("prime.main_prime", "reward_model.model.path"),
        ("spin.main_spin", "register_policy_loss"),
        ("gkd.main_gkd", "distillation.enabled=True"),
    ],
)
def test_recipes_that_are_not_here_name_another_way(name, way):
    with pytest.raises(ImportError, match=f"recipe '{name.split('.')[0]}' is not here: .*{way}"):
        runpy.run_module(f"recipe.{name}", run_name="__main__")
