"""The dataset class of verl 0.5, for users' datasets that extend it."""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from verl.config import DataConfig
from verl.config.keys import flatten, owner_of
from verl.data.files import ListRows, Rows, open_rows, without_nulls
from verl.data.pictures import reader_of
from verl.data.rl_dataset import RLDataset
from verl.utils.errors import DataError
from verl.utils.imports import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.data.pictures import PictureReader


class RLHFDataset(RLDataset):
    """`RLDataset` with padded prompts.

    An item also has `input_ids`, `attention_mask` and `position_ids`, (P,) int64, with P =
    `max_prompt_length` and padding on the left. `config` is the section `data`, or a mapping with
    some of its keys; the others have their defaults. `processor` or `pictures` read images.
    """

    def __init__(
        self,
        data_files: Any,
        tokenizer: "PreTrainedTokenizerBase",
        config: DataConfig | Mapping[str, Any],
        processor: Any = None,
        split: str = "train",
        pictures: "PictureReader | None" = None,
    ) -> None:
        if processor is not None and pictures is None:
            pictures = reader_of(processor)
            if pictures is None:
                raise DataError(
                    "The processor must be the one that data.custom_cls gets, or give "
                    "pictures=verl.data.build.build_picture_reader(config.model, tokenizer)."
                )
        super().__init__(data_files, tokenizer, _section(config), split=split, pictures=pictures)
        self.processor = processor

    def _read_files_and_tokenize(self) -> None:
        """Read `data_files` into `dataframe`, a table of the package datasets.

        A subclass may override it to make other rows, as in verl: call this method or read the
        files itself, and set `dataframe`. Nothing is tokenized here.
        """
        table = require("datasets", "The rows of a dataset of your own", "pip install datasets")
        rows = []
        for file in self.data_files:
            source = open_rows(file, self._split)
            rows += [source.row(number) for number in range(len(source))]
        self.dataframe: Any = table.Dataset.from_list(rows)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Return the table as it is: long prompts are dropped later, see `RLDataset`."""
        return dataframe

    def _open_files(self, split: str) -> list[Rows]:
        if not self._reads_itself:
            return super()._open_files(split)
        self._split = split
        self.data_files = list(self.files)
        self._read_files_and_tokenize()
        rows = [dict(row) for row in self.dataframe]

        self.files = [f"{type(self).__name__}({', '.join(self.files)})"]
        return [_TableRows(rows)]

    def _fingerprints(self, split: str) -> list[str]:
        if not self._reads_itself:
            return super()._fingerprints(split)
        digest = hashlib.blake2b(digest_size=16)
        for row in self.dataframe:
            digest.update(repr(row).encode())
        return [f"{digest.hexdigest()} {split}"]

    @property
    def _reads_itself(self) -> bool:
        own = type(self)._read_files_and_tokenize
        return own is not RLHFDataset._read_files_and_tokenize

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = super().__getitem__(item)
        ids = torch.tensor(row["raw_prompt_ids"], dtype=torch.int64)
        start = self.config.max_prompt_length - len(ids)
        padding: Any = self.tokenizer.pad_token_id

        if start and padding is None:
            raise DataError(
                "The tokenizer has no pad_token, which fills short prompts. Set "
                "tokenizer.pad_token."
            )

        mask = torch.arange(self.config.max_prompt_length) >= start
        input_ids = torch.full((len(mask),), padding or 0).masked_scatter_(mask, ids)
        position_ids = (mask.cumsum(0) - 1).clamp_(min=0)
        return {
            "input_ids": input_ids,
            "attention_mask": mask.long(),
            "position_ids": position_ids,
            **row,
        }


class _TableRows(ListRows):
    """Rows of a table of the package datasets, which is one of Arrow."""

    def as_written(self, value: Any) -> Any:
        return without_nulls(value)


def _section(config: DataConfig | Mapping[str, Any]) -> DataConfig:
    if isinstance(config, DataConfig):
        return config
    section = DataConfig()
    for path, value in flatten(config, DataConfig).items():
        owner, name = owner_of(section, path)
        setattr(owner, name, value)
    return section
