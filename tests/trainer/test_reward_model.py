"""Runs scored by a reward model with a family, tokenizer and template other than those of the
actor."""

import json

import pytest
import torch

from tests.tiny_reward_models import other_tokenizer, save_reward_model
from tests.trainer.runs import TOY, run, step_lines, write_lines
from verl.models.reward_model import RewardModel
from verl.workers.reward_inputs import compute_reward

QUESTIONS = ("Say yes", "1 + 1", "Who?", "A long one, is it not?", "Count")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return settings of a data set of prompts alone, and the reward model."""
    folder = tmp_path_factory.mktemp("rm")
    save_reward_model(folder / "rm", "llama", tokenizer=other_tokenizer())
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in QUESTIONS]
    data = write_lines(folder / "prompts.jsonl", rows)
    without_set = [override for override in TOY if "dataset_name" not in override]
    return [
        *without_set,
        "actor_rollout_ref.model.path=toy",
        f"data.train_files={data}",
        "data.max_prompt_length=64",
        "reward_model.enable=True",
        f"reward_model.model.path={folder / 'rm'}",
    ]


@pytest.mark.parametrize("algorithm", ["grpo", "gae", "remax"])
def test_prompts_alone_suffice_if_a_reward_model_scores(tmp_path, settings, algorithm):
    files = next(override for override in settings if "train_files" in override).replace(
        "train_", "val_"
    )
    dumped = [f"trainer.rollout_data_dir={tmp_path / 'rows'}", files, "trainer.test_freq=2"]
    assert run(tmp_path, f"algorithm.adv_estimator={algorithm}", *dumped, base=settings) == 0
    first, second = step_lines(tmp_path)
    assert "timing_s/rm" in first
    assert second["val-core/unknown/reward/mean@1"] != 0

    lines = [json.loads(line) for line in (tmp_path / "rows" / "1.jsonl").read_text().splitlines()]
    scores = torch.tensor([line["score"] for line in lines])
    assert scores.std() > 0.1, "too flat to tell a difference"
    assert first["critic/score/mean"] == pytest.approx(scores.mean().item(), rel=1e-5)
    # The token that ends the actor's turn is not part of its text.
    asked = [next(text for text in QUESTIONS if text in line["input"]) for line in lines]
    said = [line["output"].removesuffix("<|end|>") for line in lines]
    model = RewardModel.from_pretrained(settings[-1].partition("=")[2])
    torch.testing.assert_close(compute_reward(model, said, asked), scores, atol=1e-4, rtol=1e-5)


def test_validation_rows_with_a_ground_truth_keep_their_rule(tmp_path, settings):
    row = {"prompt": [{"role": "user", "content": "1 + 1"}], "data_source": "openai/gsm8k"}
    rows = [
        row | {"reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 0}}
    ] * 2
    files = write_lines(tmp_path / "val.jsonl", rows)
    assert run(tmp_path, f"data.val_files={files}", "trainer.test_freq=2", base=settings) == 0
    assert step_lines(tmp_path)[-1]["val-core/openai/gsm8k/reward/mean@1"] == 0
