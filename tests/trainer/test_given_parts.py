"""Parts that a program gives as objects are checked before a weight is loaded."""

import pandas as pd
import pytest
import torch

from verl.rewards.managers import reward_managers
from verl.trainer import RLTrainer
from verl.utils.errors import ConfigError, DataError, RewardError

TOY = {"data.dataset_name": "toy", "data.train_batch_size": 4, "max_steps": 1}
ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{number} + 1 = ?"}],
        "data_source": "toy",
        "reward_model": {"ground_truth": str(number + 1)},
    }
    for number in range(4)
]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


async def awaited(batch, return_dict=False):
    return {"reward_tensor": torch.zeros(batch.batch["responses"].shape)}


class Awaited:
    async def __call__(self, batch, return_dict=False):
        return await awaited(batch)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("reward.py", "got str. A function of one response"),
        (compute_score, r"its signature is \(data_source, .* belongs into custom_reward_function"),
        (lambda batch: 1, "got an unexpected keyword argument 'return_dict'"),
        (awaited, "got a coroutine function, which is not awaited"),
        (Awaited(), "got a coroutine function, which is not awaited"),
    ],
    ids=["text", "one response", "no return_dict", "async", "async call"],
)
@pytest.mark.parametrize("name", ["reward_fn", "val_reward_fn"])
def test_a_reward_that_cannot_score_batches_is_refused_at_start(name, reward, message):
    with pytest.raises(ConfigError, match=rf"^{name} scores whole batches.*{message}"):
        RLTrainer(TOY, **{name: reward})


@pytest.mark.parametrize("name", ["train_dataset", "val_dataset"])
def test_the_limit_of_prompts_holds_for_rows_of_a_program(name):
    long = {**ROWS[0], "prompt": [{"role": "user", "content": "1 + " * 80}]}
    parts = {"train_dataset": ROWS, "val_dataset": ROWS, name: [long, *ROWS]}
    with pytest.raises(DataError, match=f"^{name}, row 0: the prompt has .* tokens, data.max_p"):
        RLTrainer(TOY, **parts)

    trainer = RLTrainer({**TOY, "data.filter_overlong_prompts": True}, **parts)
    assert len(trainer.ppo.train_loader.dataset) == len(trainer.ppo.val_loader.dataset) == 4
    trainer = RLTrainer({**TOY, "data.truncation": "left", "data.shuffle": False}, **parts)
    loader = {"train_dataset": trainer.ppo.train_loader, "val_dataset": trainer.ppo.val_loader}
    for batch in loader[name]:
        assert max(map(len, batch.non_tensor_batch["raw_prompt_ids"])) <= 64


def test_a_tokenizer_is_no_name():
    with pytest.raises(ConfigError, match="tokenizer must be a tokenizer .* got str, which lacks"):
        RLTrainer(TOY, tokenizer="gpt2")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("train.parquet", "got str. Name files in data.train_files"),
        ({"train": ROWS}, r"got dict. Give one of its entries, a split: {name}\[...\]."),
        (pd.DataFrame(ROWS), r"got DataFrame. Give a table's rows: table.to_dict\('records'\)."),
        (iter(ROWS), r"got list_iterator. Give a list of them: list\(rows\)."),
        ([[1]] * 4, "row 0 is a list of 1: int."),
        ([], "has no rows. Give one with rows"),
    ],
    ids=["text", "dict", "table", "iterator", "lists", "empty"],
)
@pytest.mark.parametrize("name", ["train_dataset", "val_dataset"])
def test_a_dataset_without_rows_by_number_is_refused_at_start(name, dataset, message):
    with pytest.raises(DataError, match=f"^{name} .*{message.format(name=name)}"):
        RLTrainer(TOY, **{name: dataset})


def test_a_list_of_rows_is_a_dataset():
    assert len(RLTrainer(TOY, train_dataset=ROWS, val_dataset=ROWS).ppo.train_loader) == 1


def test_misspelt_roles_of_a_dataset_are_warned_of_once(capsys):
    wrong = [{**row, "prompt": [{"role": "usr", "content": "1 + 1 = ?"}]} for row in ROWS]
    for _ in RLTrainer(TOY, train_dataset=wrong, val_dataset=ROWS).ppo.train_loader:
        pass
    said = capsys.readouterr().out
    assert said.count("did you mean") == 1
    assert "W A prompt of the data set: message 0 has the role 'usr'; did you mean" in said


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def __init__(self, tokenizer): 1 / 0", "raised ZeroDivisionError in line 4"),
        ("def __init__(self): pass", "raised TypeError: .*takes 1 positional argument but 2"),
        ("def __init__(self, tokenizer): pass", "scores whole batches.*got Manager"),
    ],
    ids=["raises", "no tokenizer", "not callable"],
)
def test_a_configured_manager_is_checked_at_start(tmp_path, body, message):
    name = f"manager_{abs(hash(body))}"
    file = tmp_path / "my_manager.py"
    file.write_text(
        "from verl.rewards.registry import reward_managers\n"
        f"@reward_managers.register({name!r})\n"
        f"class Manager:\n    {body}\n"
    )
    keys = {"actor_rollout_ref.model.external_lib": str(file), "reward_model.reward_manager": name}
    with pytest.raises((ConfigError, RewardError), match=message):
        RLTrainer(TOY | keys)


@reward_managers.register("test_without_return_dict")
class WithoutReturnDict:
    def __init__(self, tokenizer): ...

    def __call__(self, data):
        return data


@pytest.mark.parametrize(
    "data",
    [{"data.dataset_name": "toy"}, {"actor_rollout_ref.model.path": "toy", "n": 2}],
    ids=["with data", "without data"],
)
def test_a_configured_manager_is_named_by_its_key(data):
    message = r"^reward_model\.reward_manager=test_without_return_dict scores whole batches"
    with pytest.raises(ConfigError, match=message):
        RLTrainer(
            data, adv_estimator="grpo", reward_model={"reward_manager": "test_without_return_dict"}
        )
