"""Cache folders of the package, and models and trainers that the tests of a file share."""

from pathlib import Path

import pytest

from tests.tiny_reward_models import other_tokenizer, save_reward_model
from verl.data import shapes
from verl.trainer import RLTrainer


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "verl_cache"))


@pytest.fixture
def few_shapes(
    _alone: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut the data set off before its pictures are drawn: every run prepares all of its rows."""
    monkeypatch.setenv("VERL_CACHE", str(tmp_path_factory.getbasetemp() / "cache-of-few-shapes"))
    monkeypatch.setattr(shapes, "SIZES", {"train": 12, "val": 4})


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(
        tmp_path_factory.mktemp("rm") / "rm", "gpt2", tokenizer=other_tokenizer()
    )


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> RLTrainer:
    """Build a trainer without training data and critic, for the calls that need neither."""
    model = {
        "actor_rollout_ref.model.path": "toy",
        "algorithm.adv_estimator": "grpo",
        "rollout_config": {"n": 2},
    }
    folder = str(tmp_path_factory.mktemp("untrained"))
    return RLTrainer(
        {**model, "max_new_tokens": 8, "data.max_prompt_length": 24},
        trainer={"default_local_dir": folder},
    )
