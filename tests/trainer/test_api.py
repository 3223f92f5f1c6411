"""The facade for programs and notebooks: trains like the entry point, generates and scores on its
own."""

import json
import re
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import verl
from tests.launches import launch
from tests.tiny_reward_models import other_tokenizer, save_reward_model
from tests.trainer.runs import (
    same_bits,
    start_trainer,
    step_lines,
    weights,
    without_times,
)
from verl.data.chat import apply_chat_template
from verl.data.toy import TOY_MODEL
from verl.models.critic import CriticModel
from verl.models.load import load_tokenizer
from verl.models.reward_model import RewardModel
from verl.protocol import DataProto
from verl.trainer import PPOTrainer, RLTrainer
from verl.utils.errors import ConfigError, DataError, RewardError, WorkerError
from verl.workers.reward_inputs import compute_reward

ASKED = ["3 + 11 = ?", "2 + 5 = ?", "6 + 6 = ?"]
CHATS = [[{"role": "user", "content": text}] for text in ASKED]
# The runs of tests.trainer.runs, as keyword arguments.
TOY: dict[str, Any] = {
    "data": {"dataset_name": "toy", "train_batch_size": 4},
    "max_new_tokens": 8,
    "rollout_config": {"n": 4, "backend": "local"},
    "actor_config": {"use_kl_loss": False, "lr": 1e-3},
    "trainer": {"val_before_train": False, "max_steps": 2, "save_freq": 2},
}
PPO: dict[str, Any] = {"algorithm": {"adv_estimator": "gae"}, "critic_config": {"lr": 1e-3}}


def facade(folder: Path, **keywords: Any) -> RLTrainer:
    where = {"trainer.default_local_dir": str(folder), "trainer.logger": ["console", "file"]}
    return RLTrainer({**TOY, **where}, **keywords)


def entry_point(folder: Path, *overrides: str) -> Any:
    trainer = start_trainer(folder, "trainer.save_freq=2", *overrides)
    trainer.fit()
    return trainer


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


def by_transformers(state: dict[str, torch.Tensor] | None = None) -> list[str]:
    """Generate greedy answers to ASKED with transformers, one at a time."""
    model = AutoModelForCausalLM.from_pretrained(TOY_MODEL)
    tokenizer = load_tokenizer(TOY_MODEL)
    if state is not None:
        model.load_state_dict(state)
    texts = []
    for chat in CHATS:
        ids = torch.tensor([apply_chat_template(tokenizer, chat)])
        said = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
        )
        texts.append(tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


# ---------------------------------------------------------------- training


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


# ---------------------------------------------------------------- rollout


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
    monkeypatch.setattr("verl.data.rl_dataset.say_once", lambda text, level: said.append(text))
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


# ---------------------------------------------------------------- compute_reward


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


# ---------------------------------------------------------------- several ranks

PROGRAM = """
import json, sys
from verl.trainer import RLTrainer
from verl.utils.errors import WorkerError

trainer = RLTrainer(sys.argv[1], **json.loads(sys.argv[3]))
asked = ["3 + 11 = ?", "2 + 5 = ?", "6 + 6 = ?"]
result = {"one": trainer.rollout(asked[:1], greedy=True), "before": trainer.rollout(asked, n=2)}
result["scores"] = trainer.compute_reward(["14", "no idea", "7"], asked).tolist()
result["metrics"] = trainer.train(micro_batch_size=2, gradient_accumulation_steps=int(sys.argv[4]))
result["mini"] = trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size
try:
    result["critic"] = type(trainer.critic.model).__name__
except WorkerError as error:
    result["critic"] = str(error)
json.dump(result, open(sys.argv[2], "w"))
"""
YAML = """
backend: local
max_new_tokens: 8
lr: 1e-4
critic_config: {{lr: 1e-3}}
rollout_config: {{n: 4, deterministic: true, temperature: 2}}
algorithm: {{adv_estimator: gae}}
data: {{dataset_name: toy, train_batch_size: 4}}
reward_model: {{enable: true, model: {{path: {rm}}}}}
actor_rollout_ref.actor.use_kl_loss: false
trainer: {{val_before_train: false, max_steps: 1, test_freq: -1, num_threads: 1, default_local_dir: {folder}}}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, reward_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("program")
    (folder / "run.yaml").write_text(YAML.format(rm=reward_folder, folder=folder))
    (folder / "program.py").write_text(PROGRAM)
    return folder


def run_program(arguments: list[str]) -> None:
    """Run `python program.py arguments` in this folder."""
    sys.argv = ["program.py", *arguments]
    runpy.run_path("program.py")


@pytest.fixture(scope="module")
def alone(program: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(program)
        patch.setattr("sys.argv", sys.argv)
        run_program(["run.yaml", "alone.json", "{}", "4"])
    return json.loads((program / "alone.json").read_text())


APART = {
    "actor_placement": [0],
    "critic_placement": [1],
    "reward_model_placement": [1],
    "enable_hybrid_engine": False,
}


@pytest.mark.slow
@pytest.mark.parametrize(("keywords", "steps", "place"), [({}, 2, "[0, 1]"), (APART, 4, "[1]")])
def test_two_ranks_generate_score_and_train_like_one_process(
    alone, program, tmp_path, keywords, steps, place
):
    arguments = ["run.yaml", str(tmp_path / "result.json"), json.dumps(keywords), str(steps)]
    done = launch(2, run_program, arguments, folder=program)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert alone["critic"] == "CriticModel"
    assert f"its weights lie on the ranks {place}" in result["critic"]
    assert result["mini"] == alone["mini"] == 2
    assert (result["one"], result["before"]) == (alone["one"], alone["before"])
    assert result["scores"] == pytest.approx(alone["scores"], rel=1e-5)
    for name in ("critic/score/mean", "actor/grad_norm", "critic/grad_norm", "actor/entropy"):
        assert result["metrics"][name] == pytest.approx(alone["metrics"][name], rel=2e-5), name
