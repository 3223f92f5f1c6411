"""The configuration selects files, dataset class and sampler."""

import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from tests.data.rows import make_rows
from verl.config import DataConfig, TrainConfig
from verl.data import RLDataLoader, RLDataset, build_dataset, build_sampler
from verl.data.build import data_files
from verl.data.toy import toy_files
from verl.trainer.setup import build_loaders
from verl.utils.errors import ConfigError, DataError

USER_FILE = """
import torch


class Padded(torch.utils.data.Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None):
        self.arguments = (data_files, tokenizer, config, processor)

    def __len__(self):
        return 4

    def __getitem__(self, item):
        return {"input_ids": torch.tensor([0, item + 1]), "attention_mask": torch.tensor([0, 1]), "data_source": "own"}


class Raw:
    def __init__(self, data_files, tokenizer, config):
        self.key = config.prompt_key

    def __len__(self):
        return 4

    def __getitem__(self, item):
        return {self.key: [{"role": "user", "content": f"What is {item} + 1?"}], "row": item}


class Plain:
    def __init__(self, data_files, tokenizer, config):
        pass

    def __len__(self):
        return 0

    def __getitem__(self, item):
        raise IndexError(item)


class Bare:
    pass


class Stream:
    def __init__(self, data_files, tokenizer, config):
        pass

    def __iter__(self):
        return iter(())


class Backwards:
    def __init__(self, data_source, data_config):
        self.count = len(data_source)

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter(range(self.count - 1, -1, -1))
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(USER_FILE)
    return str(tmp_path / "own.py")


def make_config(**settings) -> TrainConfig:
    config = TrainConfig()
    for name, value in settings.items():
        setattr(config.data, name, value)
    return config


def test_toy_dataset_is_its_own_validation_set(tokenizer):
    config = make_config(dataset_name="toy")
    for split in ("train", "val"):
        dataset = build_dataset(config, tokenizer, split=split)
        assert dataset is not None
        assert len(dataset) == 10
    assert data_files(make_config(dataset_name="toy", val_files=["v.parquet"]).data, "val") == [
        "v.parquet"
    ]
    assert data_files(config.data, "val") == toy_files()


def test_saved_folder_has_train_and_validation_splits(tokenizer, tmp_path):
    rows = make_rows(5)
    DatasetDict(
        {"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[:2])}
    ).save_to_disk(str(tmp_path / "a"))
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "b"))
    both = make_config(dataset_name=str(tmp_path / "a"))
    one = make_config(dataset_name=str(tmp_path / "b"))
    sizes = [len(build_dataset(both, tokenizer, split=split) or []) for split in ("train", "val")]
    assert sizes == [5, 2]
    train, val = (build_dataset(one, tokenizer, split=split) for split in ("train", "val"))
    assert isinstance(train, RLDataset)
    assert (len(train), val) == (5, None)


def test_training_files_are_required(tokenizer, parquet):
    config = make_config(train_files=[parquet(make_rows(3))])
    train = build_dataset(config, tokenizer, split="train")
    assert train is not None
    assert len(train) == 3
    assert build_dataset(config, tokenizer, split="val") is None
    with pytest.raises(DataError, match="No training data"):
        build_dataset(make_config(), tokenizer, split="train")
    for name in ("tyo", "openai/gsm8k"):
        with pytest.raises(
            DataError,
            match=f"must be 'toy', 'calculator', 'shapes', a file.*found none at '{name}'.*examples/data_preprocess",
        ):
            build_dataset(make_config(dataset_name=name), tokenizer, split="train")


def test_max_samples_limits_the_rows(tokenizer, parquet, own):
    rows = {
        "train_files": [parquet(make_rows(9))],
        "val_files": [parquet(make_rows(9), "v.parquet")],
    }
    config = make_config(**rows, train_max_samples=4, val_max_samples=2)
    train, val = (build_dataset(config, tokenizer, split=split) for split in ("train", "val"))
    assert train is not None
    assert val is not None
    assert len(train) == 4
    assert [val[0]["index"], val[1]["index"], len(val)] == [0, 1, 2]

    with pytest.raises(ConfigError, match=r"data\.train_max_samples must be at least 1, or -1"):
        build_dataset(make_config(**rows, train_max_samples=0), tokenizer, split="train")
    config.data.custom_cls.path = own
    config.data.custom_cls.name = "Padded"
    with pytest.raises(ConfigError, match="train_max_samples=4 needs a dataset that derives from"):
        build_dataset(config, tokenizer, split="train")


def test_user_dataset_with_padded_items(tokenizer, own):
    config = make_config(train_files=["x.parquet"])
    config.data.custom_cls.path = own
    config.data.custom_cls.name = "Padded"
    dataset = build_dataset(config, tokenizer, split="train")
    assert dataset.arguments == (["x.parquet"], tokenizer, config.data, None)  # pyright: ignore
    loader = RLDataLoader(dataset, 2, shuffle=False, seed=1)  # pyright: ignore
    assert [batch.non_tensor_batch["raw_prompt_ids"].tolist() for batch in loader] == [
        [[1], [2]],
        [[3], [4]],
    ]
    assert loader.state_dict()["fingerprint"] is None


def test_items_of_a_user_dataset_may_have_messages_under_the_prompt_key(tokenizer, own):
    config = make_config(train_files=["x"], val_files=["x"], prompt_key="question")
    config.data.train_batch_size = 2
    config.data.custom_cls.path = own
    config.data.custom_cls.name = "Raw"
    config.actor_rollout_ref.model.path = "toy"
    for loader in build_loaders(config, tokenizer):
        assert loader is not None
        columns = next(iter(loader)).non_tensor_batch
        assert set(columns) == {"raw_prompt_ids", "raw_prompt", "row"}
        assert "What is" in tokenizer.decode(columns["raw_prompt_ids"][0])


def test_user_dataset_may_subclass_rl_dataset(tokenizer, parquet, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl.data.rl_dataset import RLDataset\n\n\nclass Mine(RLDataset):\n    pass\n"
    )
    config = make_config(train_files=[parquet(make_rows(3))])
    config.data.custom_cls.path = str(file)
    config.data.custom_cls.name = "Mine"
    dataset = build_dataset(config, tokenizer, split="train")
    assert isinstance(dataset, RLDataset)
    assert len(dataset) == 3


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("Plain", DataError, "Plain has no rows"),
        (
            "Bare",
            ConfigError,
            "custom_cls.name=Bare is called with .*data_files, tokenizer, config",
        ),
        ("Stream", DataError, "lacks __len__, __getitem__"),
        ("Paded", ConfigError, "Nearest names in it: Padded"),
    ],
)
def test_unsuitable_user_dataset_is_an_error(tokenizer, own, name, error, message):
    config = make_config(train_files=["x.parquet"])
    config.data.custom_cls.path = own
    config.data.custom_cls.name = name
    with pytest.raises(error, match=message):
        build_dataset(config, tokenizer, split="train")


def test_a_missing_file_of_a_users_class_is_named_with_its_key(tokenizer, parquet, tmp_path):
    missing = str(tmp_path / "missing.py")
    config = make_config(train_files=["x.parquet"])
    config.data.custom_cls.path = missing
    config.data.custom_cls.name = "Own"
    expected = f"expected a Python file at '{missing}', found none."
    with pytest.raises(ConfigError, match=rf"^data\.custom_cls\.path: {expected}"):
        build_dataset(config, tokenizer, split="train")

    dataset = RLDataset(parquet(make_rows(3)), tokenizer, DataConfig(max_prompt_length=64))
    config.data.sampler.class_path = missing
    config.data.sampler.class_name = "Own"
    with pytest.raises(ConfigError, match=rf"^data\.sampler\.class_path: {expected}"):
        build_sampler(config.data, dataset)

    config.data.custom_cls.path = "no_such_module"
    with pytest.raises(
        ConfigError, match=r"^data\.custom_cls\.path: cannot import 'no_such_module'"
    ):
        build_dataset(config, tokenizer, split="train")


def test_user_sampler_orders_the_rows(tokenizer, own, parquet):
    dataset = RLDataset(parquet(make_rows(3)), tokenizer, DataConfig(max_prompt_length=64))
    data = DataConfig()
    assert build_sampler(data, dataset) is None
    data.sampler.class_path = own
    data.sampler.class_name = "Backwards"
    loader = RLDataLoader(dataset, 3, shuffle=True, seed=1, sampler=build_sampler(data, dataset))
    assert next(iter(loader)).non_tensor_batch["index"].tolist() == [2, 1, 0]
    data.sampler.class_name = "Bare"
    with pytest.raises(ConfigError, match="class_name=Bare is called with .* data_source, data_co"):
        build_sampler(data, dataset)
    data.sampler.class_name = "torch"
    with pytest.raises((DataError, TypeError)):
        build_sampler(data, dataset)


def test_import_does_not_load_torch():
    code = "import sys, verl.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
