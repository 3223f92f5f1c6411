"""Batches in the checkpoint of a schedule: as tensors, lists and numbers, which it may hold."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from verl.models.pictures import packed_pictures, pictures_of, unpacked_pictures
from verl.protocol import DataProto
from verl.utils.column_dicts import object_column

_PICTURES = "prepared_pictures"  # a column of objects that a checkpoint may not hold


def packed(batch: DataProto | None) -> dict[str, Any]:
    """Return the columns and metrics of a batch in plain values; nothing for None."""
    if batch is None:
        return {}
    tensors = {} if batch.batch is None else dict(batch.batch.items())
    objects = {name: column.tolist() for name, column in batch.non_tensor_batch.items()}
    values = {"tensors": tensors, "objects": objects, "meta": dict(batch.meta_info)}
    if _PICTURES in objects:
        rows = pictures_of(batch)
        objects[_PICTURES] = [[picture.key for picture in own] for own in rows]
        values["pictures"] = packed_pictures(chain.from_iterable(rows))
    return values


def unpacked(values: Mapping[str, Any]) -> DataProto | None:
    """Undo `packed`."""
    if not values:
        return None
    columns = dict(values["objects"])
    if _PICTURES in columns:
        made = unpacked_pictures(values["pictures"])  # rows share their pictures again
        columns[_PICTURES] = [tuple(made[key] for key in own) for own in columns[_PICTURES]]
    objects = {name: object_column(column) for name, column in columns.items()}
    return DataProto.from_dict(
        tensors=values["tensors"], non_tensors=objects, meta_info=dict(values["meta"])
    )
