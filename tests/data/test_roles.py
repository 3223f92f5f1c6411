"""Misspelt roles are warned of by row; roles that a chat template names are not."""

import copy

import pytest

from tests.data.rows import make_row
from verl.config import DataConfig
from verl.config.sft import SFTDataConfig, SFTMultiTurnConfig
from verl.data import RLDataset, SFTDataset
from verl.data.roles import usual_role


@pytest.mark.parametrize(
    ("role", "meant"),
    [
        ("usr", "user"),
        ("User", "user"),
        (" user", "user"),
        ("assitant", "assistant"),
        ("human", "user"),
        ("gpt", "assistant"),
        ("developer", None),
        ("critic", None),
    ],
)
def test_roles_near_a_usual_one_are_found(role, meant):
    assert usual_role(role) == meant


def with_role(role: str) -> dict:
    return {**make_row(1), "prompt": [{"role": role, "content": "1 + 1 = ?"}]}


def test_a_misspelt_role_of_a_prompt_is_warned_of_once(parquet, tokenizer, caplog):
    file = parquet([make_row(1), with_role("usr"), with_role("developer"), with_role("usr")])
    RLDataset(file, tokenizer, DataConfig(max_prompt_length=64))
    assert caplog.text.count("did you mean") == 1
    assert (
        "rows.parquet, row 1, column 'prompt': message 0 has the role 'usr'; did you mean 'user'? "
        "(2 rows of this file have it)"
    ) in caplog.text


def test_a_role_that_the_template_names_is_not_doubtful(parquet, tokenizer, caplog):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'human' %}Q{% endif %}{{ m.content }}{% endfor %}"
    )
    RLDataset(parquet([with_role("human")]), tokenizer, DataConfig(max_prompt_length=64))
    assert "did you mean" not in caplog.text


def test_a_misspelt_role_of_fine_tuning_is_warned_of(parquet, tokenizer, caplog):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "asistant", "content": "Hello"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Yes"},
    ]
    talk = SFTDataConfig(multiturn=SFTMultiTurnConfig(enable=True))
    SFTDataset(parquet([{"messages": messages}]), tokenizer, talk)
    assert "row 0, column 'messages': message 1 has the role 'asistant'" in caplog.text

    caplog.clear()
    pair = {"prompt": [{"role": "Users", "content": "Hi"}], "answer": "Hello"}
    SFTDataset(
        parquet([pair]), tokenizer, SFTDataConfig(prompt_key="prompt", response_key="answer")
    )
    assert "row 0, column 'prompt': message 0 has the role 'Users'" in caplog.text
