"""`RLTrainer.compute_reward` scores responses by a reward model or a reward function."""

import numpy as np
import pandas as pd
import pytest
import torch

from tests.trainer.programs import ASKED, CHATS, facade
from verl.models.load import load_tokenizer
from verl.models.reward_model import RewardModel
from verl.utils.errors import ConfigError, DataError, RewardError
from verl.workers.reward_inputs import compute_reward


def test_a_reward_model_of_another_family_scores_in_its_own_tokens(tmp_path, reward_folder):
    trainer = facade(
        tmp_path, **{"reward_model": {"enable": True, "model": {"path": str(reward_folder)}}}
    )
    model = RewardModel.from_pretrained(reward_folder)
    tokenizer = load_tokenizer(reward_folder)
    said = ["14", "no idea", "7"]
    for prompts in (None, ASKED, CHATS):
        scores = trainer.compute_reward(said, prompts)
        assert scores.shape == (3,)
        assert scores.std() > 0.1, "too flat to tell a difference"
        torch.testing.assert_close(
            scores, compute_reward(model, said, prompts), atol=1e-4, rtol=1e-5
        )
    ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in [*said[:2], "77"]]
    torch.testing.assert_close(
        trainer.compute_reward(ids), model.score([row.tolist() for row in ids])
    )

    batch = trainer.rollout(ASKED, as_batch=True)
    texts = trainer.rollout(ASKED)
    torch.testing.assert_close(trainer.compute_reward(batch), trainer.compute_reward(texts, ASKED))
    with pytest.raises(
        RewardError, match=r"The input of response 1 has .* it takes 256.*max_response_length\.$"
    ):
        trainer.compute_reward(["short", "long" * 80])
    with pytest.raises(RewardError, match="The input of response 2 has one token"):
        trainer.compute_reward([*ids[:2], ids[2][:1]])
    with pytest.raises(RewardError, match="Response 1 is empty"):
        trainer.compute_reward(["a", ""])
    with pytest.raises(
        ConfigError, match="reads ground_truth for texts .* here the reward model scores"
    ):
        trainer.compute_reward(said, ground_truth=said)
    with torch.no_grad():
        trainer.ppo.rm_wg.worker.engine.hf_model.score.weight.fill_(float("nan"))
    with pytest.raises(RewardError, match="gives response 0, which ends .* the score nan"):
        trainer.compute_reward(said)


def test_without_a_reward_model_the_reward_function_scores(untrained):
    scores = untrained.compute_reward(
        ["14", "8", "the 12?"], ASKED, data_source="toy", ground_truth=["14", "7", "12"]
    )
    assert scores.tolist()[:2] == [1.0, 0.0]
    assert scores.dtype == torch.float32
    gsm8k = untrained.compute_reward(
        ["#### 72", "#### 7"], data_source="openai/gsm8k", ground_truth="72"
    )
    assert gsm8k.tolist() == [1.0, 0.0], (
        "texts as they are, also of characters that the actor's tokenizer lacks"
    )


@pytest.mark.parametrize(
    "column", [np.array, pd.Series, tuple, lambda entries: np.array(entries, dtype=object)]
)
def test_a_list_with_one_entry_per_response_can_be_any_column(untrained, column):
    sources = ["openai/gsm8k", "toy"]
    truths = ["42", "18"]
    columns = {"data_source": column(sources), "ground_truth": column(truths)}
    assert untrained.compute_reward(["#### 42", "18"], **columns).tolist() == [1.0, 1.0]
    for one in ("42", np.array("42"), np.str_("42")):
        assert untrained.compute_reward(
            ["#### 42"] * 2, data_source="gsm8k", ground_truth=one
        ).tolist() == [1.0, 1.0]
    with pytest.raises(
        DataError, match="entry of ground_truth for each of 1 responses, got a table of 1 rows"
    ):
        untrained.compute_reward(
            ["1"], data_source="toy", ground_truth=pd.DataFrame({"answer": ["1"]})
        )


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert solution_str != "bad", "I do not like it"
    return len(solution_str) + (extra_info or 0)
"""


def test_a_failing_reward_is_an_error_with_the_number_of_its_response(tmp_path):
    function = tmp_path / "reward.py"
    function.write_text(REWARD)
    own = {"custom_reward_function.path": str(function), "reward_model.on_error": "zero"}
    trainer = facade(tmp_path, **own, **{"reward_model.preflight": False})
    assert trainer.compute_reward(["good", "better"], extra_info=[1, 2]).tolist() == [5.0, 8.0]
    with pytest.raises(RewardError, match=r"(?s)failed on response 1 .*I do not like it"):
        trainer.compute_reward(["good", "bad"])


@pytest.mark.parametrize(
    ("responses", "columns", "error", "message"),
    [
        (["1"], {}, ConfigError, "a rule needs data_source and ground_truth. Give"),
        (["1"], {"data_source": "toy"}, ConfigError, "a rule needs ground_truth. Give"),
        (
            ["1"],
            {"data_source": "toi", "ground_truth": "1"},
            RewardError,
            "No reward rule for data_source 'toi'",
        ),
        (
            ["1"],
            {"data_source": "toy", "ground_truth": ["1", "2"]},
            DataError,
            "entry of ground_truth for each of 1 resp",
        ),
        (
            ["1", ""],
            {"data_source": "toy", "ground_truth": "1"},
            RewardError,
            "Response 1 must be a text",
        ),
        (
            [[3, 4]],
            {"data_source": "toy", "ground_truth": "1"},
            RewardError,
            "Response 0 must be a text .* got .3, 4",
        ),
        ([], {"data_source": "toy", "ground_truth": "1"}, DataError, "at least one"),
        ("1", {"data_source": "toy", "ground_truth": "1"}, DataError, "needs a list of responses"),
        (
            None,
            {"data_source": "toy", "ground_truth": "1"},
            DataError,
            "needs a list of responses, .* got None",
        ),
    ],
)
def test_responses_that_no_function_can_score_are_reported(
    untrained, responses, columns, error, message
):
    with pytest.raises(error, match=message):
        untrained.compute_reward(responses, **columns)
