"""Describe the values that keys expect, and find those that OmegaConf lets pass."""

from pathlib import Path
from typing import Any, get_args

from verl.config.actor import ExtraLossConfig
from verl.config.keys import Key, keys_of
from verl.config.policies import PolicyConfig

_LARGEST = 2**63 - 1  # of torch
_TYPE_NAMES = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    int | str: "a whole number or a text",
    list[int]: "a list of whole numbers",
    list[float]: "a list of numbers",
    list[str]: "a list of texts",
    dict[str, Any]: "a mapping of names to values",
    dict[str, PolicyConfig]: (
        "{role: {<key>: <value>}} with the keys " + ", ".join(keys_of(PolicyConfig))
    ),
    list[ExtraLossConfig]: "a list of {name: <registered loss>, coef: <number>}",
}


def allows_null(key: Key) -> bool:
    """Return whether a key may be null."""
    return key.type is Any or type(None) in get_args(key.type)


def takes_text(key: Key) -> bool:
    """Return whether the value of a key is one text."""
    return _plain_type(key) is str


def has_misfits(key: Key, value: Any) -> bool:
    """Return whether values of a wrong kind passed OmegaConf.

    These are numbers other than 0 and 1 for True and False, True and False for texts, numbers with
    a fraction for texts, integers too large for torch, texts with underscores that Python reads as
    numbers, and entries of a list (or a value that becomes one) of a wrong kind.
    """
    if key.setting.many:
        if value is None:
            return False
        entries = value if isinstance(value, (list, tuple)) else [value]
        return not all(isinstance(entry, (str, Path)) for entry in entries)
    if isinstance(value, str):
        return _plain_type(key) in (int, float) and _has_odd_underscores(value)
    if isinstance(value, (bool, float)):
        return takes_text(key)
    if isinstance(value, int):
        return value not in (0, 1) if _plain_type(key) is bool else abs(value) > _LARGEST
    if not isinstance(value, list) or _plain_type(key) not in (list[int], list[float], list[str]):
        return False
    are_texts = _plain_type(key) == list[str]
    return any(_is_misfit_in_list(entry, are_texts) for entry in value)


def _is_misfit_in_list(entry: Any, are_texts: bool) -> bool:
    if isinstance(entry, str):
        return not are_texts and _has_odd_underscores(entry)
    return entry is None or isinstance(entry, (list, dict, bool) if are_texts else (list, dict))


def type_message(key: Key, value: Any, written_as: str) -> str:
    """Say which values a key expects, instead of this one, and how to write them."""
    hint = " Write null for no value." if value in ("None", "none") else ""
    if value == "after_each_epoch":
        hint = " Give the steps of an epoch: rows divided by data.train_batch_size."
    entries = value if isinstance(value, list) else [value]
    if any(isinstance(entry, str) and _has_odd_underscores(entry) for entry in entries):
        hint = " Write a number without underscores, except between thousands (1_000_000)."
    if any(isinstance(entry, bool) for entry in entries) and "text" in describe_type(key):
        none = ", or null for none" if "null" in describe_type(key) else ""
        hint = (
            " Without quotes, YAML reads on, yes and true as True, and off, no and false as False. "
            f"Write a text in quotes{none}."
        )
    if isinstance(value, float) and takes_text(key):
        hint = " Without quotes, YAML reads 1.10 as 1.1. Write a text in quotes."
    if isinstance(value, int) and abs(value) > _LARGEST:
        hint = f" The largest is {_LARGEST}."
    return (
        f"{written_as} expects {describe_type(key)}, got {value!r} ({type(value).__name__}).{hint}"
    )


def _has_odd_underscores(text: str) -> bool:
    """Return whether Python reads a text such as 1_5 as a number, here 15."""
    return "_" in text and text.replace("_", "").lstrip("+-").replace(".", "", 1).isdecimal()


def describe_type(key: Key) -> str:
    """Describe the values that a key expects."""
    if key.type is Any:
        return "a text or a list of texts" if key.setting.many else "a value or a list"
    return _TYPE_NAMES[_plain_type(key)] + (" or null" if allows_null(key) else "")


def _plain_type(key: Key) -> Any:
    """Return the type of a key that is set."""
    parts = [part for part in get_args(key.type) if part is not type(None)]
    return parts[0] if key.type is not Any and allows_null(key) and parts else key.type
