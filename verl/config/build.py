"""From given values of keys to a configuration object, converted to the types of its schema.

OmegaConf converts them. `load` knows where the values come from.
"""

import copy
import dataclasses
import functools
import pickle
import re
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, get_args

from hydra.core.config_store import ConfigNode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.compose import plain_values
from verl.config.keys import Key, Values, flatten, keys_of, keys_of_entries, owner_of, value_at
from verl.config.value_types import describe_type, has_misfits, type_message
from verl.utils.errors import ConfigError

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")  # to another key, in a default


def build_config(given: Values, schema: type, written_as: Mapping[str, str]) -> Any:
    """Return the configuration of values by key. Keys that are not given have their defaults.

    Args:
        given: by the main name of each key; they may hold interpolations of other keys.
        schema: the class of the configuration.
        written_as: how the user wrote keys, for errors.

    Raises:
        ConfigError: a value is not of the type of its key, or cannot be resolved.
    """
    if any("${" in repr(value) for value in given.values()):
        config = resolve(given, schema, written_as)
    else:
        config = fill(given, schema, written_as)
    _tidy(config)
    return config


def fill(given: Values, schema: type, written_as: Mapping[str, str]) -> Any:
    """Return the configuration of values without interpolations.

    It is that of `resolve`, in a tenth of its time: OmegaConf converts given values alone.
    """
    keys = keys_of(schema)
    config = schema()
    for path, value in given.items():
        leaf = copy.deepcopy(_leaf(schema, path))
        owner, name = owner_of(config, path)
        _assign(leaf, name, keys[path], value, written_as.get(path, path))
        try:
            converted = OmegaConf.to_object(leaf)
        except OmegaConfBaseException:  # such as a missing value in a mapping
            return resolve(given, schema, written_as)  # raises the message with its whole path
        setattr(owner, name, getattr(converted, name))

    for key in _followers(schema):
        if key.path in given:
            continue
        owner, name = owner_of(config, key.path)
        setattr(owner, name, _followed_value(config, key))
    return config


def _followed_value(config: Any, key: Key) -> Any:
    """Return the value of a key that the user leaves unset and that follows others."""
    if key.followed is not None:
        return copy.deepcopy(value_at(config, key.followed))
    assert key.interpolation is not None
    return _REFERENCE.sub(lambda match: str(value_at(config, match[1])), key.interpolation)


def resolve(given: Values, schema: type, written_as: Mapping[str, str]) -> Any:
    """Return the configuration of values whose interpolations OmegaConf resolves."""
    keys = keys_of(schema)
    tree = pickle.loads(_pickled_tree(schema))
    for path, value in given.items():
        _assign(tree, path, keys[path], value, written_as.get(path, path))
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise ConfigError(_resolution_message(tree, schema)) from error
    assert isinstance(config, schema)
    return config


@functools.cache
def typed_tree(schema: type) -> DictConfig:
    """Return the typed tree of defaults, with interpolations for keys that follow others."""
    tree = OmegaConf.structured(schema())
    for key in keys_of(schema).values():
        if key.interpolation is not None:
            OmegaConf.update(tree, key.path, key.interpolation)
    return tree


class SchemaNode(ConfigNode):
    """A schema in Hydra's ConfigStore, under the name of its root, built when Hydra asks for it."""

    def __init__(self, root: str, schema: type) -> None:
        self.name = f"{root}.yaml"
        self.group = self.package = self.provider = None
        self.schema = schema

    @functools.cached_property
    def node(self) -> DictConfig:  # pyright: ignore[reportIncompatibleVariableOverride]
        return typed_tree(self.schema)


@functools.cache
def _pickled_tree(schema: type) -> bytes:
    """Return the pickled tree: OmegaConf's copy of one takes seven times as long as its pickle."""
    return pickle.dumps(typed_tree(schema))


@functools.cache
def _leaf(schema: type, path: str) -> DictConfig:
    """Return a typed tree of one key, by its name without its section."""
    key = keys_of(schema)[path]
    name = path.rpartition(".")[2]
    default = dataclasses.field(default_factory=lambda: copy.deepcopy(key.default))
    leaf = dataclasses.make_dataclass("Leaf", [(name, key.type, default)])
    return OmegaConf.structured(leaf)


@functools.cache
def _followers(schema: type) -> tuple[Key, ...]:
    """Return the keys that follow others when unset, each after those that it follows."""
    keys = keys_of(schema)
    graph = {path: _REFERENCE.findall(key.interpolation or "") for path, key in keys.items()}
    in_order = [keys[path] for path in TopologicalSorter(graph).static_order()]
    return tuple(key for key in in_order if key.interpolation is not None)


def _assign(tree: DictConfig, path: str, key: Key, value: Any, written_as: str) -> None:
    """Set a key at its `path` in a tree, converted to its type. Raises ConfigError."""
    takes_int = int in (key.type, *get_args(key.type))
    if takes_int and isinstance(value, float) and value.is_integer():
        value = int(value)  # 1e3
    if has_misfits(key, value):
        raise ConfigError(type_message(key, value, written_as))
    try:
        OmegaConf.update(tree, path, value, merge=True)
    except OmegaConfBaseException as error:
        raise ConfigError(type_message(key, value, written_as)) from error


def _resolution_message(tree: DictConfig, schema: type) -> str:
    """Name the key that cannot be resolved, and the reason."""
    written = flatten(plain_values(tree), schema)
    for key in keys_of(schema).values():
        if key.main is not None:
            continue

        try:
            value = OmegaConf.select(tree, key.path, throw_on_missing=True)
            if OmegaConf.is_config(value):
                OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            return (
                f"{key.path}={written.get(key.path, MISSING)} cannot be resolved to "
                f"{describe_type(key)}: {reason}"
            )
    raise AssertionError("every key resolves alone, but not all together")


def _tidy(config: Any) -> None:
    """Turn a single value into a list if both are accepted, and expand `~` in paths."""
    for key in (*keys_of(type(config)).values(), *keys_of_entries(config)):
        if not (key.setting.many or key.setting.is_path):
            continue
        owner, name = owner_of(config, key.path)
        value = getattr(owner, name)

        if key.setting.many and not isinstance(value, list):
            if value is not None:
                value = [value]
            elif key.default is not None:
                value = []

        if key.setting.is_path:
            if isinstance(value, list):
                value = [_expanded(item) for item in value]
            else:
                value = _expanded(value)
        setattr(owner, name, value)


def _expanded(path: Any) -> Any:
    return str(Path(path).expanduser()) if isinstance(path, str) and path.startswith("~") else path
