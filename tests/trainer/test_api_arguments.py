"""A wrong argument of a public call of RLTrainer is named: what was expected, and what came."""

import pytest
import torch

from tests.tiny_reward_models import other_tokenizer, save_reward_model
from verl.models.reward_model import RewardModel
from verl.trainer import RLTrainer
from verl.utils.errors import ConfigError, DataError
from verl.workers.reward_inputs import compute_reward

ASKED = ["3 + 11 = ?", "2 + 5 = ?", "6 + 6 = ?"]
CHAT = [{"role": "user", "content": ASKED[0]}]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> RLTrainer:
    folder = str(tmp_path_factory.mktemp("run"))
    return RLTrainer(
        {"actor_rollout_ref.model.path": "toy", "algorithm.adv_estimator": "grpo"},
        max_new_tokens=4,
        n=2,
        default_local_dir=folder,
    )


@pytest.fixture(scope="module")
def rm(tmp_path_factory: pytest.TempPathFactory) -> RewardModel:
    folder = tmp_path_factory.mktemp("rm") / "rm"
    return RewardModel.from_pretrained(
        str(save_reward_model(folder, "gpt2", tokenizer=other_tokenizer()))
    )


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ("rollout", {"n": True}, r"rollout\(n=...\) must be a whole number, at least 1, got True"),
        ("rollout", {"seed": True}, r"rollout\(seed=...\) must be a whole .* or None, got True"),
        ("rollout", {"greedy": "no"}, r"rollout\(greedy=...\) must be True or False, got 'no'"),
        ("rollout", {"as_batch": 2}, r"rollout\(as_batch=...\) must be True or False, got 2"),
        ("show", {"height": "7"}, r"show\(height=...\) must be a whole number, .* got '7'"),
    ],
)
def test_an_argument_of_a_wrong_type_is_named(trainer, call, arguments, message):
    given = [ASKED] if call == "rollout" else []
    with pytest.raises(ConfigError, match=message):
        getattr(trainer, call)(*given, **arguments)


NO_LIST = r"compute_reward\(prompts=...\) must be a list of texts or chats, one for each of 2 "


@pytest.mark.parametrize("by_model", [False, True], ids=["function", "model"])
@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (5, NO_LIST + "responses, got int: 5"),
        ({"role": "user"}, NO_LIST + "responses, got dict: {'role'"),
        (CHAT, NO_LIST + "responses, got the messages of one. Give a list of chats"),
        (ASKED, NO_LIST + "responses, got 3"),
        (torch.tensor(5), NO_LIST + "responses, got Tensor"),
        (["ok", 5], "The prompt of response 1 must be a list of messages .* got int: '5'"),
    ],
)
def test_prompts_of_a_wrong_type_are_named(trainer, rm, by_model, prompts, message):
    responses = ["1", "2"]
    with pytest.raises(DataError, match=message):
        if by_model:
            compute_reward(rm, responses, prompts)
        else:
            trainer.compute_reward(responses, prompts, data_source="toy", ground_truth="1")


def test_one_text_is_the_prompt_of_all_responses(rm):
    responses = ["1", "22"]
    expected = compute_reward(rm, responses, [ASKED[0]] * 2)
    assert torch.equal(compute_reward(rm, responses, ASKED[0]), expected)
    assert torch.equal(compute_reward(rm, responses, iter([ASKED[0]] * 2)), expected)


def test_an_iterator_as_a_column_of_compute_reward_is_named(trainer):
    truths = (str(number) for number in range(2))
    message = (
        r"compute_reward\(ground_truth=...\) must be a list of 2 entries, or one for all, got "
        r"generator\. Give list"
    )
    with pytest.raises(DataError, match=message):
        trainer.compute_reward(["1", "2"], data_source="toy", ground_truth=truths)


def test_a_batch_with_responses_holds_no_prompts_for_rollout(trainer):
    batch = trainer.rollout(ASKED, as_batch=True)
    with pytest.raises(DataError, match="must have prompts without responses, got one of an earl"):
        trainer.rollout(batch)
    assert len(trainer.rollout(list(batch.non_tensor_batch["raw_prompt"]))) == 3
