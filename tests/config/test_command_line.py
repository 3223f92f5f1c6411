"""Words of a command line that look like something else, and messages about unreadable ones."""

from pathlib import Path

import pytest

from verl.config import load_config
from verl.config.load import config_from_dict, read_overrides
from verl.utils.errors import ConfigError

BASE = ["data.dataset_name=toy", "data.train_batch_size=4"]


@pytest.mark.parametrize("text", ["1.10", "1e-5", "1_000", "+5", "1.", "007", "12", "nan", "-Inf"])
def test_a_name_that_looks_like_a_number_stays_as_it_is_written(text: str):
    config = load_config([*BASE, f"trainer.experiment_name={text}"])
    assert config.trainer.experiment_name == text
    assert config.trainer.default_local_dir == f"checkpoints/toy/{text}"
    assert read_overrides([f"--trainer.experiment_name={text}"]) == {
        "trainer": {"experiment_name": text}
    }


def test_another_name_of_a_key_keeps_a_text_too():
    config = load_config(["model.partial_pretrain=1.10", "data.train_files=a"], root="sft_trainer")
    assert config.model.path == "1.10"


def test_a_number_for_a_text_is_refused_where_its_form_is_lost(tmp_path: Path):
    file = tmp_path / "run.yaml"
    for text, is_kept in (("1.10", False), ("'1.10'", True), ("12", True)):
        file.write_text(f"trainer: {{experiment_name: {text}}}")
        if is_kept:
            name = load_config([str(file), *BASE]).trainer.experiment_name
            assert name == text.strip("'")
            continue
        with pytest.raises(ConfigError, match=r"got 1\.1 \(float\)\. .*Write a text in quotes"):
            load_config([str(file), *BASE])

    with pytest.raises(ConfigError, match=r"expects text, got 1\.1 \(float\)"):
        config_from_dict({"data": {"dataset_name": "toy"}, "trainer": {"experiment_name": 1.1}})


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("=", r"^Expected key=value, got '='\."),
        ("+=1", r"^Expected key=value, got '\+=1'\."),
        ("a b=1", "a key is names with one dot between them"),
        ("—trainer.seed=1", "a key is names with one dot between them"),
        ("trainer/seed=1", r"^There is no group of files .* between them: trainer\.seed=value\.$"),
        ("trainer.logger=[console,", r"'\]' is missing at its end\. Write it without spaces"),
        ("trainer={seed:", "'}' is missing at its end"),
        ("data.train_files=a=1/b", r"\"data\.train_files='a=1/b'\"\.$"),
        ("data.train_files=数", r"\(a character needs quotes\).*\"data\.train_files='数'\"\.$"),
        ("data.train_files=it's(1)", r"within the argument: \"key='value'\"\.$"),
    ],
)
def test_the_message_about_an_unreadable_word_shows_the_right_one(word: str, message: str):
    with pytest.raises(ConfigError, match=message) as raised:
        load_config([*BASE, word])
    assert "++" not in str(raised.value), "Hydra's form of the word is not the user's"
