"""Small Python tools of verl 0.5 (`verl.utils.py_functional`)."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from omegaconf import DictConfig, ListConfig

from verl.utils.column_dicts import union_dict
from verl.utils.errors import BatchError


def append_to_dict(data: dict[str, list[Any]], new_data: Mapping[str, Any]) -> None:
    """Append each value of `new_data` to the list under its key in `data`, in place."""
    for key, value in new_data.items():
        data.setdefault(key, []).append(value)


def union_two_dict(dict1: dict[Any, Any], dict2: Mapping[Any, Any]) -> dict[Any, Any]:
    """Add the entries of `dict2` to `dict1`, in place, and return it.

    Raises BatchError (an AssertionError) if a key of both has unequal values.
    """
    dict1.update(union_dict(dict1, dict(dict2), "entries"))
    return dict1


def rename_dict(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values under `<prefix>/<key>`; a slash at the end of the prefix is optional."""
    if prefix and not prefix.endswith("/"):
        prefix += "/"
    return {f"{prefix}{key}": value for key, value in data.items()}


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn [{key: value}, ...] into {key: [value, ...]}. All must have the same keys."""
    if not list_of_dict:
        return {}
    keys = list_of_dict[0].keys()
    for number, entry in enumerate(list_of_dict):
        if entry.keys() != keys:
            raise BatchError(
                f"All dictionaries must have the same keys; {number} differs from 0 in "
                f"{sorted(entry.keys() ^ keys)}."
            )

    lists: dict[str, list[Any]] = {}
    for key in keys:
        lists[key] = [entry[key] for entry in list_of_dict]
    return lists


def convert_to_regular_types(obj: Any) -> Any:
    """Turn OmegaConf's containers and numpy's values into plain ones, at any depth."""
    if isinstance(obj, dict | DictConfig):
        return {key: convert_to_regular_types(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple | ListConfig):
        return [convert_to_regular_types(value) for value in obj]
    if isinstance(obj, np.generic):
        return obj.item()
    if isinstance(obj, np.ndarray):
        return obj.tolist()
    return obj


@contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """Set an environment variable within this context, and restore it afterwards."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


class NestedNamespace(SimpleNamespace):
    """A dictionary as attributes, including nested dictionaries."""

    def __init__(self, dictionary: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for key, value in dictionary.items():
            nested = NestedNamespace(value) if isinstance(value, Mapping) else value
            setattr(self, key, nested)


class DynamicEnumMeta(type):
    """Makes the class an iterable container of its members."""

    _registry: ClassVar[dict[str, Any]]

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls._registry.values())

    def __contains__(cls, item: Any) -> bool:
        if isinstance(item, str):
            return item in cls._registry
        return item in cls._registry.values()

    def __getitem__(cls, name: str) -> Any:
        return cls._registry[name]

    def __reduce_ex__(cls, protocol: Any) -> Any:
        return getattr, (__import__(cls.__module__, fromlist=[cls.__name__]), cls.__name__)

    def names(cls) -> list[str]:
        """Return the names of the members, in the order of their registration."""
        return list(cls._registry)

    def values(cls) -> list[Any]:
        """Return the members."""
        return list(cls._registry.values())


class DynamicEnum(metaclass=DynamicEnumMeta):
    """Base of enumerations that take members at run time: `register`, `remove`, `from_name`.

    Each subclass has its own members.
    """

    _registry: ClassVar[dict[str, Any]] = {}
    _next_value: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        cls._registry = {}
        cls._next_value = 0

    def __init__(self, name: str, value: int) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self.value}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the member itself after unpickling, not a copy."""
        return getattr, (type(self), self.name)

    @classmethod
    def register(cls, name: str) -> Any:
        """Add a member and return it. Its name is converted to capitals, and must be new."""
        key = name.upper()
        if key in cls._registry:
            raise ValueError(f"{key} is already registered in {cls.__name__}; use another name.")
        member = cls(key, cls._next_value)
        cls._registry[key] = member
        setattr(cls, key, member)
        cls._next_value += 1
        return member

    @classmethod
    def remove(cls, name: str) -> Any:
        """Remove a member and return it."""
        key = name.upper()
        member = cls._registry.pop(key)
        delattr(cls, key)
        return member

    @classmethod
    def from_name(cls, name: str) -> Any:
        """Return the member of that name, in upper or lower case; None if there is none."""
        return cls._registry.get(name.upper())
