"""With a vision tower that is not trained, rollout and update compute each picture once."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.test_pictures import config, trainer_on_rows
from verl.trainer import PPOTrainer

FROZEN = {"actor_rollout_ref.actor.freeze_vision_tower": True}


def reward(batch: Any, return_dict: bool = False) -> Any:
    """Score responses by their first token, so that groups differ and an update has a gradient."""
    responses = batch.batch["responses"]
    scores = torch.zeros(responses.shape)
    scores[:, -1] = (responses[:, 0] % 2).float()
    return {"reward_tensor": scores, "reward_extra_info": {}} if return_dict else scores


def new_trainer(folder: Path, **keys: Any) -> PPOTrainer:
    trainer = PPOTrainer(config(folder, **keys), reward_fn=reward)
    trainer.init_workers()
    return trainer


def count_patches(trainer: PPOTrainer) -> dict[str, int]:
    """Add up the patches that each side's tower reads from now on."""
    actor: Any = trainer.actor_wg.worker
    rollout: Any = trainer.rollout_wg.worker
    towers = {
        "trainer": actor.engine.hf_model.base_model.visual,
        "rollout": rollout.engine.twin.module.base_model.visual,
    }
    patches = dict.fromkeys(towers, 0)
    for place, tower in towers.items():

        def count(module: Any, inputs: Any, output: Any, place: str = place) -> None:
            patches[place] += len(inputs[0])

        tower.register_forward_hook(count)
    return patches


def weights_of(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    actor: Any = trainer.actor_wg.worker
    return {name: each.detach().clone() for name, each in actor.engine.hf_model.named_parameters()}


def patches_of_one_pass(batch: Any) -> int:
    pictures = {}
    for own in batch.non_tensor_batch["prepared_pictures"]:
        for picture in own:
            pictures[picture.key] = len(picture.inputs["pixel_values"])
    return sum(pictures.values())


def test_a_frozen_tower_computes_each_picture_once(few_shapes, tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, **FROZEN)
    patches = count_patches(trainer)
    (batch, *_) = trainer.train_loader

    before = weights_of(trainer)
    trainer.global_step = 1
    trainer.step(batch)
    after = weights_of(trainer)
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert patches == {"trainer": 0, "rollout": patches_of_one_pass(batch)}

    # the same pictures in a later step
    trainer.global_step = 2
    trainer.step(batch)
    assert patches == {"trainer": 0, "rollout": patches_of_one_pass(batch)}


def test_weights_are_those_without_kept_features(
    few_shapes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_store = new_trainer(tmp_path / "with", **FROZEN)
    start = weights_of(with_store)
    with_store.fit()

    monkeypatch.setattr("verl.workers.actor.keep_features", lambda model: None)
    without = new_trainer(tmp_path / "without", **FROZEN)
    patches = count_patches(without)
    without.fit()
    assert patches["trainer"] > 0

    found = weights_of(with_store)
    expected = weights_of(without)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6)
    assert any(not torch.equal(found[name], start[name]) for name in start)


def test_a_trained_tower_is_computed_on_both_sides(few_shapes, tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path)
    patches = count_patches(trainer)
    (batch, *_) = trainer.train_loader
    trainer.global_step = 1
    trainer.step(batch)
    assert patches["trainer"] >= patches_of_one_pass(batch)
    assert patches["rollout"] == patches_of_one_pass(batch)


def test_a_rollout_in_another_dtype_keeps_its_features_to_itself(
    few_shapes, tmp_path: Path
) -> None:
    keys = {**FROZEN, "actor_rollout_ref.rollout.dtype": "bfloat16"}
    trainer = new_trainer(tmp_path, **keys)
    patches = count_patches(trainer)
    (batch, *_) = trainer.train_loader
    trainer.global_step = 1
    trainer.step(batch)
    assert patches["trainer"] == patches_of_one_pass(batch)
    assert patches["rollout"] == patches_of_one_pass(batch)


def test_a_loaded_checkpoint_drops_features(few_shapes, tmp_path: Path) -> None:
    trainer = new_trainer(tmp_path, **FROZEN)
    worker: Any = trainer.actor_wg.worker
    worker.save_checkpoint(tmp_path / "saved")
    (batch, *_) = trainer.train_loader
    generated = trainer.generate(batch)
    assert len(worker.features) == 4

    patches = count_patches(trainer)
    worker.load_checkpoint(tmp_path / "saved")
    worker.compute_log_prob(generated)
    assert patches["trainer"] == patches_of_one_pass(batch)


def test_a_trained_connector_is_computed_on_both_sides(tmp_path: Path) -> None:
    trainer = trainer_on_rows(tmp_path, "gemma3", "Here <image>\nHow many?", **FROZEN)
    worker: Any = trainer.actor_wg.worker
    assert worker.features is None
