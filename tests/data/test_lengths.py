"""Lengths are measured once, and again after a change or with a damaged cache."""

import copy
from pathlib import Path

import pytest

from tests.data.rows import make_row, make_rows
from verl.config import DataConfig
from verl.data import RLDataset, files
from verl.data import lengths as module


def measured(caplog) -> int:
    count = caplog.text.count("Measured")
    caplog.clear()
    return count


@pytest.fixture
def load(caplog):
    caplog.set_level("INFO", logger="verl")

    def make(file, tokenizer, **settings) -> int:
        RLDataset(file, tokenizer, DataConfig(**{"max_prompt_length": 64, **settings}))
        return measured(caplog)

    return make


def test_second_run_uses_the_cache(parquet, tokenizer, load):
    file = parquet(make_rows(5))
    assert load(file, tokenizer) == 1
    assert load(file, tokenizer) == 0
    assert load(file, tokenizer, max_prompt_length=50, filter_overlong_prompts=True) == 0


def test_content_tokenizer_and_template_change_the_cache_key(parquet, tokenizer, load):
    file = parquet(make_rows(5))
    assert load(file, tokenizer) == 1
    assert load(parquet([*make_rows(4), make_row(7)]), tokenizer) == 1
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = tokenizer.chat_template + "\n"
    assert load(file, changed) == 1
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["= ?"])
    assert load(file, larger) == 1


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_damaged_cache_is_measured_again_with_a_message(
    parquet, tokenizer, load, cache: Path, caplog, damage
):
    file = parquet([make_row(0), make_row(1, "x" * 300)])
    assert load(file, tokenizer, filter_overlong_prompts=True) == 1
    (kept,) = (cache / "prompt_lengths").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(
        {"cut": whole[:-1], "flip": whole[:-3] + b"\0" + whole[-2:], "empty": b""}[damage]
    )
    dataset = RLDataset(
        file, tokenizer, DataConfig(max_prompt_length=64, filter_overlong_prompts=True)
    )
    assert len(dataset) == 1
    assert "is damaged" in caplog.text
    assert kept.read_bytes() == whole


def test_unwritable_cache_gives_only_a_message(parquet, tokenizer, load, cache, caplog):
    (cache / "prompt_lengths").write_text("a file where the folder should be")
    RLDataset(parquet(make_rows(2)), tokenizer, DataConfig(max_prompt_length=64))
    assert "Cannot store prompt lengths" in caplog.text


def test_cache_is_in_the_home_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("VERL_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert module.cache_folder() == tmp_path / ".cache" / "verl"


def test_lengths_do_not_depend_on_the_chunk_size(tokenizer, monkeypatch):
    conversations = [make_row(0, "x" * n)["prompt"] for n in (5, 1, 9, 0, 3)]
    expected = [n + 3 for n in (5, 1, 9, 0, 3)]
    for chunk in (1, 2, 5):
        monkeypatch.setattr(files, "_CHUNK", chunk)
        got = module.prompt_lengths(
            tokenizer, conversations, count=5, key=f"chunk{chunk}", name="test"
        )
        assert got.tolist() == expected
