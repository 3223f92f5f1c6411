"""Check objects and arguments that a program gives a trainer, before a weight is loaded."""

import inspect
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import numpy as np

from verl.data import RLDataset
from verl.data.own_rows import count_rows
from verl.utils.errors import ConfigError, DataError
from verl.utils.user_parts import describe_value, read_row


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ConfigError for an object that cannot encode and decode, such as a name."""
    missing = []
    for name in ("__call__", "decode", "batch_decode", "chat_template"):
        if not hasattr(tokenizer, name):
            missing.append(name)
    if missing:
        raise ConfigError(
            f"tokenizer must be a tokenizer of transformers, got {describe_value(tokenizer)}, which "
            f"lacks {', '.join(missing)}. Give AutoTokenizer.from_pretrained(...), or name one in "
            "data.tokenizer."
        )


def check_reward(reward: Any, name: str) -> None:
    """Raise ConfigError for a reward that cannot be called as `reward(batch, return_dict=True)`.

    Args:
        reward: a reward manager, or a function of a program.
        name: how the user names it, at the beginning of the error.
    """
    contract = (
        f"{name} scores whole batches: it is called as reward(batch, return_dict=True) with a "
        "DataProto, and returns {'reward_tensor': scores (B, R)}"
    )
    way_out = (
        "A function of one response, such as compute_score(data_source, solution_str, "
        "ground_truth, extra_info), belongs into custom_reward_function.path, or into "
        "verl.rewards.manager.NaiveRewardManager(tokenizer, 0, compute_score)."
    )
    if not callable(reward):
        raise ConfigError(f"{contract}; got {describe_value(reward)}. {way_out}")

    is_async = inspect.iscoroutinefunction(reward)
    if is_async or inspect.iscoroutinefunction(type(reward).__call__):
        raise ConfigError(
            f"{contract}; got a coroutine function, which is not awaited. Let it run its "
            f"coroutines itself, by asyncio.run(...). {way_out}"
        )

    signature = _signature_of(reward)
    if signature is None:
        return
    try:
        signature.bind(None, return_dict=True)
    except TypeError as error:
        raise ConfigError(
            f"{contract}; its signature is {signature}: {error}. {way_out}"
        ) from error


def _signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function; None for one of C that has none."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def check_dataset(dataset: Any, name: str) -> None:
    """Raise DataError for a data set of a user without rows by number, each of them a dict.

    Args:
        dataset: rows, as an object or of a class of the user; None is none.
        name: how the user names it, at the beginning of the error.
    """
    if dataset is None or isinstance(dataset, RLDataset):
        return
    expected = (
        f"{name} must have rows by number (__len__ and __getitem__), each a dict such as "
        "{'prompt': [{'role': 'user', 'content': ...}], 'data_source': ..., 'reward_model': "
        "{'ground_truth': ...}}"
    )
    way_out = None
    if hasattr(dataset, "iloc"):
        way_out = "Give a table's rows: table.to_dict('records')."
    elif isinstance(dataset, Mapping):
        way_out = f"Give one of its entries, a split: {name}[...]."
    elif isinstance(dataset, str):
        way_out = "Name files in data.train_files and data.val_files."
    elif not all(hasattr(type(dataset), method) for method in ("__len__", "__getitem__")):
        way_out = "Give a list of them: list(rows)."
    if way_out is not None:
        raise DataError(f"{expected}; got {describe_value(dataset)}. {way_out}")

    if count_rows(dataset) == 0:
        raise DataError(f"{name} has no rows. Give one with rows, or leave it out.")
    row = read_row(dataset, 0)
    if not isinstance(row, Mapping):
        raise DataError(f"{expected}; row 0 is {describe_value(row)}.")


def check_number(call: str, name: str, value: Any) -> None:
    """Raise ConfigError unless the argument of a call is a whole number of at least 1."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{call}({name}=...) must be a whole number, at least 1, got {value!r}.")


def check_flag(call: str, name: str, value: Any) -> None:
    """Raise ConfigError unless the argument of a call is True or False."""
    if not isinstance(value, Integral | np.bool_) or value not in (0, 1):
        raise ConfigError(f"{call}({name}=...) must be True or False, got {value!r}.")
