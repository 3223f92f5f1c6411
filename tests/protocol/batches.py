"""Batches for the tests, and their equivalent as a plain list of rows to compare each operation
with."""

from typing import Any

import numpy as np
import torch
from hypothesis import strategies

from verl.protocol import DataProto
from verl.utils.column_dicts import object_column


def make_batch(rows: int, kind: str = "both", start: int = 0) -> DataProto:
    """Return a batch in which row i holds numbers and objects of its own.

    `kind` is "both", "tensors" or "objects".
    """
    numbers = torch.arange(start, start + rows)
    tensors = {
        "ids": numbers[:, None] * 10 + torch.arange(4),
        "scores": (numbers.double() / 7).sqrt(),
        "half": numbers[:, None, None].bfloat16() * torch.ones(1, 2, 3).bfloat16(),
        "flag": numbers % 2 == 0,
    }
    objects = {
        "text": object_column(f"row {start + i}" for i in range(rows)),
        "ragged": object_column([start + i] * (i % 3) for i in range(rows)),
        "pair": object_column([start + i, i] for i in range(rows)),
        "plain": np.arange(start, start + rows),
    }

    return DataProto.from_dict(
        tensors if kind != "objects" else None,
        objects if kind != "tensors" else None,
        meta_info={"step": 3},
    )


def as_rows(data: DataProto) -> list[dict[str, Any]]:
    """Return the batch as a list of dictionaries of plain Python values."""
    tensors = (
        {} if data.batch is None else {key: value.tolist() for key, value in data.batch.items()}
    )
    columns = {**tensors, **{key: list(value) for key, value in data.non_tensor_batch.items()}}
    return [{key: column[i] for key, column in columns.items()} for i in range(len(data))]


def dtypes(data: DataProto) -> dict[str, Any]:
    tensors = (
        {}
        if data.batch is None
        else {key: (value.dtype, value.shape[1:]) for key, value in data.batch.items()}
    )
    return {
        **tensors,
        **{key: (value.dtype, value.shape[1:]) for key, value in data.non_tensor_batch.items()},
    }


kinds = strategies.sampled_from(["both", "tensors", "objects"])
batches = strategies.builds(make_batch, strategies.integers(0, 7), kinds)
