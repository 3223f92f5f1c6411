"""The tree of keys as a flat table, and checks of nested values against it."""

import dataclasses
import difflib
import functools
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.absent_keys import absent_key, way_by_training
from verl.config.setting import Setting, setting_of
from verl.utils.errors import ConfigError

# verl's way of naming the class of a section; ours are known, so the line is read over.
IGNORED_NAME = "_target_"
# OmegaConf's mark of a value still to be given.
_MISSING = "???"
Values = Mapping[str, Any]  # of keys, by path or nested


@dataclass(frozen=True)
class Key:
    """One leaf of the tree."""

    path: str
    setting: Setting
    type: Any
    default: Any

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @functools.cached_property
    def followed(self) -> str | None:
        """Path of the one key that gives the value of this key when unset, or None."""
        source = self.setting.alias_of or self.setting.follows
        if source is None or "${" in source:
            return None
        return f"{self.section}{source}" if source.startswith(".") else source

    @property
    def main(self) -> str | None:
        """Path of the key of which this one is another name, or None."""
        return None if self.setting.alias_of is None else self.followed

    @property
    def interpolation(self) -> str | None:
        """Return OmegaConf's text for the key when unset."""
        if self.followed is not None:
            return f"${{{self.followed}}}"
        return self.setting.follows


@functools.cache
def keys_of(root: type) -> dict[str, Key]:
    """Return every key below the section class `root`, by path, in the order of declaration."""
    return {key.path: key for key in _walk(root(), "")}


def _walk(section: Any, prefix: str) -> Iterator[Key]:
    for field in dataclasses.fields(section):
        path = prefix + field.name
        value = getattr(section, field.name)
        setting = setting_of(field)
        if setting is None:
            yield from _walk(value, f"{path}.")
        else:
            yield Key(path, setting, field.type, value)


def keys_of_entries(config: Any) -> Iterator[Key]:
    """Give the keys of sections that the user names, such as a value of `agent.policies`."""
    for key in keys_of(type(config)).values():
        if not isinstance(key.default, dict):
            continue
        entries = value_at(config, key.path) or {}  # a program may have set None
        for name, entry in entries.items():
            if dataclasses.is_dataclass(entry):
                if "." in name:
                    raise ConfigError(f"{key.path}: a name must have no dot, got '{name}'.")
                yield from _walk(entry, f"{key.path}.{name}.")


def owner_of(config: Any, path: str) -> tuple[Any, str]:
    """Return the section object that holds a key, and the key's name in it."""
    *sections, name = path.split(".")
    for section in sections:
        config = config[section] if isinstance(config, dict) else getattr(config, section)
    return config, name


def value_at(config: Any, path: str) -> Any:
    """Return the value of a key in a configuration object."""
    return getattr(*owner_of(config, path))


def written(value: Any) -> str:
    """Return a value as a command line has it."""
    return "null" if value is None else str(value)


def is_inherited(config: Any, key: Key, value: Any) -> bool:
    """Return whether the value comes from the followed key, which is checked itself."""
    return key.followed is not None and value == value_at(config, key.followed)


def is_changed(config: Any, key: Key, value: Any) -> bool:
    """Return whether the value is the key's own, and no default or one that counts as it."""
    is_default = value == key.default or value in key.setting.also
    return not is_default and not is_inherited(config, key, value)


def flatten(values: Values, root: type) -> dict[str, Any]:
    """Flatten nested values to {path: value}.

    Raises ConfigError with the names of all unknown keys.
    """
    known = keys_of(root)
    sections = _sections_of(root)
    flat: dict[str, Any] = {}
    unknown: list[str] = []

    def visit(node: Values, prefix: str) -> None:
        for name, value in node.items():
            path = f"{prefix}{name}"
            if name == IGNORED_NAME or value == _MISSING:
                continue

            if path in known:
                flat[path] = value
            elif path not in sections:
                unknown.extend(_leaves(value, path))
            elif isinstance(value, Mapping):
                visit(value, f"{path}.")
            elif value is not None:
                raise ConfigError(
                    f"'{path}' is a section with keys of its own, got {value!r}. Set "
                    f"{path}.<key>=<value>."
                )

    visit(values, "")
    if unknown:
        messages = [_unknown_key_message(path, list(known)) for path in unknown]
        raise ConfigError("\n".join(messages))
    return flat


@functools.cache
def _sections_of(root: type) -> frozenset[str]:
    """Return the paths of all sections."""
    sections = set()
    for path in keys_of(root):
        while path := path.rpartition(".")[0]:
            sections.add(path)
    return frozenset(sections)


def _leaves(value: Any, path: str) -> list[str]:
    if not isinstance(value, Mapping) or not value:
        return [path]
    leaves: list[str] = []
    for name, inner in value.items():
        leaves += _leaves(inner, f"{path}.{name}")
    return leaves


def nest(flat: Values) -> dict[str, Any]:
    """Undo `flatten`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def rename_aliases(
    given: Values, keys: Mapping[str, Key], on_line: Container[str] = ()
) -> tuple[dict[str, Any], dict[str, str]]:
    """Move the value of a key's other name to the key itself; the alias then follows it.

    Returns the values by main key, and how the user wrote each main key. Names `on_line` overrule
    others.
    """
    renamed: dict[str, Any] = {}
    written_as: dict[str, str] = {}
    aliases: list[tuple[str, str]] = []  # name, and the key that it stands for
    for path, value in given.items():
        main = keys[path].main
        if main is None:
            renamed[path] = value
            written_as[path] = path
        elif value is not None:
            aliases.append((path, main))

    for path, main in aliases:
        value = given[path]
        if renamed.get(main) is not None and renamed[main] != value:
            other = written_as[main]
            if (path in on_line) == (other in on_line):
                raise ConfigError(
                    f"{path} and {other} are two names of one setting, got {value!r} and "
                    f"{renamed[main]!r}. Set {main} alone."
                )
            if other in on_line:
                continue
        renamed[main] = value
        written_as[main] = path

    return renamed, written_as


def _unknown_key_message(path: str, known: list[str]) -> str:
    way = absent_key(path) or way_by_training(path, known)
    if way is not None:
        return f"Unknown key '{path}': {way}"
    return f"Unknown key '{path}'. Nearest known: {nearest_keys(path, known)}."


def nearest_keys(path: str, known: list[str]) -> str:
    """Return keys that end in `path`, or keys that `path` ends in, or similar ones.

    Similar keys come from the same section, else have the same name, else are from the whole tree.
    """
    section, _, name = path.rpartition(".")
    ending: list[str] = []
    inner: list[str] = []
    same_name: list[str] = []
    siblings: dict[str, str] = {}
    for key in known:
        own_section, _, own_name = key.rpartition(".")
        if key.endswith(f".{path}"):
            ending.append(key)
        if path.endswith(f".{key}"):
            inner.append(key)
        if own_section == section:
            siblings[own_name] = key
        if own_name == name:
            same_name.append(key)

    close_names = difflib.get_close_matches(name, list(siblings), n=3, cutoff=0.6)
    similar = [siblings[close] for close in close_names]
    best = ending or inner or similar or same_name
    if not best:
        best = difflib.get_close_matches(path, known, n=4, cutoff=0.5)
    return ", ".join(best[:4]) if best else "none; --cfg job prints all keys"
