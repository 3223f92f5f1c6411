"""Batches in the checkpoint of a schedule: as tensors, lists and numbers, which it may hold."""

from collections.abc import Mapping
from typing import Any

from verl.protocol import DataProto
from verl.utils.column_dicts import object_column


def packed(batch: DataProto | None) -> dict[str, Any]:
    """Return the columns and metrics of a batch in plain values; nothing for None."""
    if batch is None:
        return {}
    tensors = {} if batch.batch is None else dict(batch.batch.items())
    objects = {name: column.tolist() for name, column in batch.non_tensor_batch.items()}
    return {"tensors": tensors, "objects": objects, "meta": dict(batch.meta_info)}


def unpacked(values: Mapping[str, Any]) -> DataProto | None:
    """Undo `packed`."""
    if not values:
        return None
    objects = {name: object_column(column) for name, column in values["objects"].items()}
    return DataProto.from_dict(
        tensors=values["tensors"], non_tensors=objects, meta_info=dict(values["meta"])
    )
