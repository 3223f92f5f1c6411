"""The repr of a trainer is one line about its run, and loads nothing."""

import pytest

from verl.trainer import RLTrainer

TOY = {"data.dataset_name": "toy", "data.train_batch_size": 4, "trainer.logger": []}


@pytest.fixture
def keys(tmp_path) -> dict[str, object]:
    return {**TOY, "trainer.default_local_dir": str(tmp_path), "trainer.val_before_train": False}


def test_the_repr_follows_a_run(tmp_path, keys):
    trainer = RLTrainer(keys, max_new_tokens=4, max_steps=2)
    about = "<RLTrainer sync of toy: "
    assert repr(trainer) == f"{about}step 0 of 2, models not loaded, in {tmp_path}>"
    assert not trainer.has_models

    trainer.rollout(["1 + 1 = ?"])
    assert repr(trainer) == f"{about}step 0 of 2, models loaded, in {tmp_path}>"
    trainer.train()
    assert repr(trainer) == f"{about}step 2 of 2, models loaded, in {tmp_path}>"
    trainer.close()
    assert repr(trainer) == f"{about}step 2 of 2, closed, in {tmp_path}>"


def test_the_repr_names_another_mode_and_missing_data(tmp_path, keys):
    validates = RLTrainer(keys, val_only=True)
    assert repr(validates).startswith("<RLTrainer val_only of toy: step 0 of ")

    del keys["data.dataset_name"]
    asked = {"actor_rollout_ref.model.path": "toy", "actor_rollout_ref.rollout.n": 2}
    trainer = RLTrainer({**keys, **asked, "algorithm.adv_estimator": "grpo"})
    expected = f"<RLTrainer sync of toy: no training data, models not loaded, in {tmp_path}>"
    assert repr(trainer) == expected
