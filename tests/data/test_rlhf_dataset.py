"""verl 0.5's dataset class, as a user's own dataset extends it."""

import json

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from tests.data.rows import make_rows
from verl.config import DataConfig
from verl.config.load import config_from_dict
from verl.data import RLDataset, build_dataset
from verl.data.collate import collate, columns_of
from verl.data.rlhf_dataset import RLHFDataset
from verl.protocol import DataProto
from verl.utils.errors import ConfigError, DataError

SETTINGS = {"max_prompt_length": 16, "truncation": "left", "custom_cls": {"path": None}}
CONFIGS = [
    SETTINGS,
    OmegaConf.create(SETTINGS),
    DataConfig(max_prompt_length=16, truncation="left"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=["dict", "omegaconf", "ours"])
def test_prompts_are_padded_on_the_left(parquet, tokenizer, config):
    files = parquet(make_rows(12))
    plain = RLDataset(files, tokenizer, DataConfig(max_prompt_length=16))
    dataset = RLHFDataset(files, tokenizer, config)
    assert len(dataset) == 12
    for item, same in zip((dataset[i] for i in range(12)), (plain[i] for i in range(12))):
        ids = item["raw_prompt_ids"]
        padding = 16 - len(ids)
        assert item["input_ids"].tolist() == [tokenizer.pad_token_id] * padding + ids
        assert item["attention_mask"].tolist() == [0] * padding + [1] * len(ids)
        assert item["position_ids"].tolist() == [0] * padding + list(range(len(ids)))
        assert {name: item[name] for name in same} == same
    short = RLHFDataset(files, tokenizer, {**SETTINGS, "max_prompt_length": 3})[0]
    assert short["input_ids"].tolist() == plain[0]["raw_prompt_ids"][-3:]


def test_data_loader_collates_columns(parquet, tokenizer):
    dataset = RLHFDataset(parquet(make_rows(4)), tokenizer, SETTINGS)
    (columns,) = DataLoader(dataset, batch_size=4, collate_fn=columns_of)  # pyright: ignore[reportArgumentType]
    assert columns["input_ids"].shape == columns["attention_mask"].shape == (4, 16)
    assert isinstance(columns["raw_prompt"], np.ndarray)
    assert columns["raw_prompt"].shape == (4,)
    batch = DataProto.from_single_dict(columns)
    assert torch.equal(batch.batch["input_ids"][2], dataset[2]["input_ids"])
    assert collate([dataset[2]]).non_tensor_batch["raw_prompt_ids"].tolist() == [
        dataset[2]["raw_prompt_ids"]
    ]


def test_training_reads_a_user_subclass(parquet, tokenizer, tmp_path):
    (tmp_path / "own.py").write_text(
        "from verl.utils.dataset.rl_dataset import RLHFDataset\n"
        "class Own(RLHFDataset):\n"
        "    def __getitem__(self, item):\n"
        "        return {**super().__getitem__(item), 'half': self.config.max_prompt_length // 2}\n"
    )
    files = parquet(make_rows(2))
    data = {
        **SETTINGS,
        "train_files": files,
        "custom_cls": {"path": str(tmp_path / "own.py"), "name": "Own"},
    }

    config = config_from_dict({"data": data, "actor_rollout_ref": {"model": {"path": "toy"}}})
    with pytest.warns(DeprecationWarning, match=r"RLHFDataset is now verl\.data\.rlhf_dataset"):
        dataset = build_dataset(config, tokenizer, split="train")
    assert dataset is not None
    assert dataset[1]["half"] == 8
    assert collate([dataset[0], dataset[1]]).non_tensor_batch["half"].tolist() == [8, 8]


def test_unsupported_settings_are_errors(parquet, tokenizer):
    files = parquet(make_rows(1))
    with pytest.raises(
        ConfigError, match="Unknown key 'max_prompt_lenght'. Nearest known: max_prompt_length"
    ):
        RLHFDataset(files, tokenizer, {"max_prompt_lenght": 3})
    with pytest.raises(DataError, match="must be the one that data.custom_cls gets"):
        RLHFDataset(files, tokenizer, SETTINGS, processor=object())


class Renamed(RLHFDataset):
    """Makes rows of its own, as ReTool's dataset does."""

    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()

        def rename(row):
            own = {"extra_info": {"number": row["number"]}, "data_source": "renamed"}
            return {**own, "reward_model": {"style": "rule", "ground_truth": row["answer"]}}

        self.dataframe = self.dataframe.map(rename, remove_columns=["answer", "number"])
        self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)


def test_a_subclass_makes_its_own_rows(tmp_path, tokenizer):
    pytest.importorskip("datasets")
    rows = []
    for number in range(3):
        prompt = [{"role": "user", "content": f"What is {number}?"}]
        rows.append({"prompt": prompt, "answer": str(number), "number": number})
    file = tmp_path / "raw.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))

    dataset = Renamed(str(file), tokenizer, {**SETTINGS, "max_prompt_length": 64})
    assert len(dataset) == 3
    assert dataset[2]["reward_model"]["ground_truth"] == "2"
    assert dataset[2]["extra_info"]["number"] == 2
    assert (dataset[2]["data_source"], "answer" in dataset[2]) == ("renamed", False)

    # Its table is Arrow's, which gives every message the keys of all.
    calls = [{"function": {"name": "add", "arguments": {}}}]
    rows[1]["prompt"].insert(0, {"role": "assistant", "content": "", "tool_calls": calls})
    file.write_text("\n".join(map(json.dumps, rows)))
    dataset = Renamed(str(file), tokenizer, {**SETTINGS, "max_prompt_length": 64})
    assert dataset[0]["raw_prompt"] == rows[0]["prompt"]

    again = Renamed(str(file), tokenizer, {**SETTINGS, "max_prompt_length": 64})
    assert again.fingerprint == dataset.fingerprint
    with pytest.raises(DataError, match=r"Renamed\(.*raw.jsonl\), row 0"):
        Renamed(str(file), tokenizer, {**SETTINGS, "max_prompt_length": 1, "truncation": "error"})
