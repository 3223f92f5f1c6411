"""`RLTrainer.rollout` generates responses to texts, chats and batches."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.trainer.programs import ASKED, CHATS, TOY, by_transformers
from verl.protocol import DataProto
from verl.trainer import RLTrainer
from verl.utils.errors import ConfigError, DataError, WorkerError


def test_prompts_can_be_texts_chats_or_a_batch(untrained):
    greedy = untrained.rollout(ASKED, greedy=True)
    assert greedy == untrained.rollout(CHATS, greedy=True) == by_transformers()
    batch = untrained.rollout(CHATS, greedy=True, as_batch=True)
    asked = DataProto.from_dict(
        non_tensors={"raw_prompt_ids": batch.non_tensor_batch["raw_prompt_ids"]}
    )
    assert untrained.rollout(asked, greedy=True) == greedy
    assert list(asked.non_tensor_batch) == ["raw_prompt_ids"], "the caller's batch stays as it is"


def test_noise_follows_the_seed(untrained):
    several = untrained.rollout(ASKED, n=4)
    assert [len(texts) for texts in several] == [4, 4, 4]
    assert several == untrained.rollout(ASKED, n=4)
    assert several != untrained.rollout(ASKED, n=4, seed=77)
    assert len({text for texts in several for text in texts}) > 2, "too dull to fail"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], r"at least one, got \[\]"),
        ("1 + 1 = ?", "needs a list of prompts"),
        (None, "needs a list of prompts .* got None"),
        (CHATS[0][0], "needs a list of prompts .* got {'role'"),
        ([CHATS[0], 3], "Prompt 1 must be a list of messages"),
        (CHATS[0], "Prompt 0 must be a list of messages"),
        (["ok", ""], "Prompt 1 ends with an empty message, so there is nothing to answer"),
        ([[{"role": "user", "content": " \n"}]], "Prompt 0 ends with an empty message"),
        (["ok", "1 + " * 30], "Prompt 1 has .* tokens, data.max_prompt_length allows 24. Raise it"),
        (
            DataProto.from_dict(non_tensors={"raw_prompt": CHATS}),
            "needs the object column raw_prompt_ids",
        ),
    ],
)
def test_prompts_that_cannot_be_answered_are_reported(untrained, prompts, message):
    with pytest.raises(DataError, match=message):
        untrained.rollout(prompts)


def test_a_role_that_seems_to_be_misspelt_is_warned_of_once(untrained, caplog):
    wrong = [{"role": "usr", "content": "1 + 1 = ?"}]
    assert len(untrained.rollout([CHATS[0], wrong, wrong])) == 3
    assert caplog.text.count("did you mean") == 1
    assert (
        "Prompt 1: message 0 has the role 'usr'; did you mean 'user'? (2 prompts have it)"
    ) in caplog.text


@pytest.mark.parametrize("seed", ["7", 1.5])
def test_a_seed_is_a_whole_number(untrained, seed):
    with pytest.raises(ConfigError, match=r"rollout\(seed=...\) must be a whole number or None"):
        untrained.rollout(ASKED, seed=seed)


def test_calls_of_other_threads_wait_for_each_other(untrained):
    expected = untrained.rollout(ASKED, greedy=True)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(untrained.rollout, ASKED, greedy=True) for _ in range(8)]
    assert [call.result() for call in calls] == [expected] * 8


def test_a_rollout_of_another_thread_cannot_end_the_training(tmp_path):
    refused = []

    def reward(batch, return_dict=False):
        with ThreadPoolExecutor(1) as pool:
            refused.append(pool.submit(trainer.rollout, ASKED).exception())
        return {"reward_tensor": torch.zeros(batch.batch["responses"].shape)}

    trainer = RLTrainer(
        {**TOY, "trainer.default_local_dir": str(tmp_path)}, reward_fn=reward, test_freq=-1
    )
    assert trainer.train()["training/global_step"] == 2
    assert all(isinstance(error, WorkerError) for error in refused)
    assert "rollout() was called while train() of the same trainer runs" in str(refused[0])
    assert len(trainer.rollout(ASKED)) == 3


def test_a_prompt_is_truncated_if_the_data_settings_allow_it(untrained, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("verl.data.prompt_limit.say_once", lambda text, level: said.append(text))
    monkeypatch.setattr(untrained.config.data, "truncation", "left")
    batch = untrained.rollout(["1 + " * 30], as_batch=True)
    assert batch.batch["attention_mask"][:, :24].sum() == 24
    assert said == [
        "Prompts of rollout() of more than data.max_prompt_length=24 tokens are cut, as "
        "data.truncation=left asks."
    ]


def test_a_missing_role_is_reported(untrained):
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        untrained.rollout(ASKED, n=0)
    with pytest.raises(DataError, match="No training data. Set data.train_files"):
        untrained.train()
    with pytest.raises(ConfigError, match="no critic, for algorithm.adv_estimator=grpo needs none"):
        untrained.critic  # noqa: B018
    with pytest.raises(ConfigError, match=r"rollout engine .*'nothing'. Nearest known: "):
        RLTrainer(TOY, backend="nothing")
