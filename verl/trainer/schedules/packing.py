"""Batches in the checkpoint of a schedule: as tensors, lists and numbers, which it may hold."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from verl.models.pictures import Picture, Pictures
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
        objects[_PICTURES], values["pictures"] = _packed_pictures(objects[_PICTURES])
    return values


def unpacked(values: Mapping[str, Any]) -> DataProto | None:
    """Undo `packed`."""
    if not values:
        return None
    columns = dict(values["objects"])
    if _PICTURES in columns:
        columns[_PICTURES] = _unpacked_pictures(columns[_PICTURES], values["pictures"])
    objects = {name: object_column(column) for name, column in columns.items()}
    return DataProto.from_dict(
        tensors=values["tensors"], non_tensors=objects, meta_info=dict(values["meta"])
    )


def _packed_pictures(
    rows: Iterable[Pictures | None],
) -> tuple[list[list[str]], dict[str, dict[str, Any]]]:
    """Return the keys of each row's pictures, and the fields of every picture once."""
    keys = []
    pictures = {}
    for own in rows:
        keys.append([picture.key for picture in own or ()])
        for picture in own or ():
            values = {field.name: getattr(picture, field.name) for field in fields(picture)}
            pictures[picture.key] = values | {"inputs": dict(picture.inputs)}
    return keys, pictures


def _unpacked_pictures(
    keys: Iterable[Iterable[str]], pictures: Mapping[str, Mapping[str, Any]]
) -> list[Pictures]:
    """Undo `_packed_pictures`. Rows share their pictures again."""
    made = {key: Picture(**values) for key, values in pictures.items()}
    return [tuple(made[key] for key in own) for own in keys]
