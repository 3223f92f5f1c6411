"""Join items of a dataset to a batch: of prompts, or of padded examples to learn from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl.data.chat import as_messages
from verl.models.packed import padded_rows
from verl.protocol import DataProto
from verl.utils.column_dicts import object_column
from verl.utils.errors import DataError

# Padded prompts of a user's dataset. The rollout pads itself and writes columns of these names.
_PADDED = ("input_ids", "attention_mask", "position_ids")


def collate(
    items: Sequence[dict[str, Any]],
    encode: Callable[[Any], list[int]] | None = None,
    prompt_key: str = "prompt",
) -> DataProto:
    """Join B items to a batch with the object column `raw_prompt_ids`.

    Tensors of equal shape are stacked to tensor columns; all other values become object columns. An
    item of a user's dataset may have `input_ids` (P,) and `attention_mask` (P,) instead of
    `raw_prompt_ids`, or as in verl 0.7 the messages `raw_prompt` alone, which `encode` turns into
    token ids. A prompt as in a row of data, under `prompt_key` or as `prompt`, becomes
    `raw_prompt`.

    Raises DataError if an item lacks prompt ids, or keys differ.
    """
    rows = [_with_prompt_ids(item, encode, prompt_key) for item in items]
    return DataProto.from_single_dict(columns_of(rows))


def prompt_ids(
    item: dict[str, Any], encode: Callable[[Any], list[int]] | None, prompt_key: str
) -> list[int]:
    """Return the token ids of an item's prompt. See `collate`."""
    return _with_prompt_ids(item, encode, prompt_key)["raw_prompt_ids"]


def columns_of(data_list: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor | np.ndarray]:
    """Return items by column: stacked tensors (B, ...) if shapes are equal, else objects (B,)."""
    keys = data_list[0].keys()
    for item in data_list:
        if item.keys() != keys:
            raise DataError(
                "All items of a dataset must have the same keys; these are not in all: "
                f"{item.keys() ^ keys}."
            )

    columns: dict[str, torch.Tensor | np.ndarray] = {}
    for key in keys:
        values = [item[key] for item in data_list]
        are_tensors = all(isinstance(value, torch.Tensor) for value in values)
        if are_tensors and all(value.shape == values[0].shape for value in values):
            columns[key] = torch.stack(values)
        else:
            columns[key] = object_column(values)

    return columns


def pad_examples(batch: DataProto) -> DataProto:
    """Pad B items to the columns that an engine reads.

    These are `input_ids` and `attention_mask` (B, T), with prompts padded left and responses right,
    and `response_mask` (B, R), which is 1 where a token is learnt. Raises DataError for items that
    have no such columns.
    """
    columns: dict[str, Any] = dict(batch.non_tensor_batch)
    if batch.batch is not None:  # tensors of equal lengths were stacked
        columns.update(batch.batch.items())
    _check_examples(columns)

    prompts, prompt_mask = padded_rows(columns["raw_prompt_ids"], side="left")
    responses, response_mask = padded_rows(columns["response_ids"])
    learnt, _ = padded_rows(columns["learnt"])
    tensors = {
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
        "response_mask": learnt,
    }
    kept = {key: columns[key] for key in ("uid", "prepared_pictures") if key in columns}
    return DataProto.from_dict(tensors=tensors, non_tensors=kept)


def _check_examples(columns: Mapping[str, Any]) -> None:
    """Raise DataError unless each item has an answer, and says which of its tokens are learnt."""
    if "response_ids" not in columns or "learnt" not in columns:
        raise DataError(
            "An item to learn from needs raw_prompt_ids (token ids), response_ids (token ids that "
            "follow) and learnt (True for each of response_ids that is learnt), got keys "
            f"{list(columns)}. A loss_mask is not read: versions of verl shift it differently."
        )

    for response, mask in zip(columns["response_ids"], columns["learnt"]):
        if len(response) != len(mask):
            raise DataError(
                "An item's response_ids and learnt must be of equal length, got "
                f"{len(response)} and {len(mask)}."
            )


def _with_prompt_ids(
    item: dict[str, Any], encode: Callable[[Any], list[int]] | None, prompt_key: str
) -> dict[str, Any]:
    ids = item.get("raw_prompt_ids")
    if ids is None and "input_ids" in item:
        ids = _without_padding(item)
    elif ids is None and encode is not None:
        item = _with_messages(item, prompt_key)
        if item.get("raw_prompt"):
            ids = encode(item["raw_prompt"])

    if ids is None:
        raise DataError(
            "An item needs raw_prompt_ids (a list of token ids), input_ids, raw_prompt or "
            f"{prompt_key} (messages), got keys {list(item)}."
        )
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        ids = _whole_numbers(ids)
    if not ids:
        place = f"an item with the keys {list(item)}"
        if "raw_prompt" in item:
            place = f"row {item.get('index')} with the messages {str(item['raw_prompt'])[:120]}"
        raise DataError(
            f"A prompt must have at least one token, got none for {place}. Leave the row out, or "
            "correct the chat template or the dataset class that makes its tokens."
        )

    columns = {"raw_prompt_ids": ids}
    for key, value in item.items():
        if key not in ("raw_prompt_ids", *_PADDED):
            columns[key] = value
    return columns


def _whole_numbers(ids: Any) -> list[int]:
    """Return token ids of an array, a tensor or a list as Python's own numbers."""
    if isinstance(ids, torch.Tensor):
        ids = ids.tolist()
    try:
        numbers = np.asarray(ids)
    except ValueError as error:  # lists of several lengths
        raise DataError(_no_token_ids(ids)) from error
    if numbers.ndim != 1 or (numbers.dtype.kind not in "iu" and numbers.size):
        raise DataError(_no_token_ids(ids))
    return numbers.tolist()


def _no_token_ids(ids: Any) -> str:
    return (
        "The raw_prompt_ids or input_ids of an item must be a list of token ids, whole numbers, "
        f"got {ids!r:.80}."
    )


def _without_padding(item: dict[str, Any]) -> torch.Tensor:
    """Return the token ids of `input_ids` under `attention_mask`."""
    padded = torch.as_tensor(item["input_ids"])
    mask = torch.as_tensor(item.get("attention_mask", torch.ones_like(padded)))
    if padded.dim() != 1 or mask.shape != padded.shape:
        raise DataError(
            "An item's input_ids and attention_mask must be 1-D and of equal length, got "
            f"shapes {tuple(padded.shape)} and {tuple(mask.shape)}."
        )
    return padded[mask.bool()]


def _with_messages(item: dict[str, Any], prompt_key: str) -> dict[str, Any]:
    """Return an item with `raw_prompt`, made of its prompt if there is no other."""
    found = [key for key in (prompt_key, "prompt") if item.get(key) is not None]
    if item.get("raw_prompt") or not found:
        return item

    key = found[0]
    columns = {name: value for name, value in item.items() if name not in (key, "raw_prompt")}
    try:
        messages = as_messages(item[key])
    except DataError as error:
        raise DataError(f"The {key} of an item {error}.") from error
    return {**columns, "raw_prompt": messages}
