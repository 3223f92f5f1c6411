"""Interactions of a YAML file, and the one that a row picks."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.agents.entries import (
    find_class,
    folder_of,
    load_class,
    read_yaml,
    require_calls,
    require_methods,
)
from verl.agents.interactions.base import BaseInteraction
from verl.utils.errors import ConfigError, DataError, MissingDependencyError, describe_error
from verl.utils.logging import say_once
from verl.utils.registry import refuse_unknown
from verl.utils.signatures import call_by_name, misspelled_settings

DEFAULT_NAME = "gsm8k"  # picked by rows without a name, as in verl 0.5
_KEYS = ("name", "class_name", "config")
_METHODS = ("start_interaction", "generate_response", "finalize_interaction")
_CALLS = {
    "start_interaction": ("instance_id",),
    "generate_response": ("instance_id", "messages"),
}


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One entry of a file: a class, its settings, and the name that rows pick it by."""

    where: str  # "interaction entry 2 of 'interactions.yaml'", for errors
    cls: type
    name: str
    config: dict[str, Any]


def initialize_interactions_from_config(path: str | Path) -> dict[str, BaseInteraction]:
    """Make the interactions of a YAML file, by name.

        interaction:
          - name: gsm8k             # default: the class without "Interaction", in lower case
            class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction   # or file.py:Class
            config: {}              # handed to the class, with `name`

    Raises:
        ConfigError: with the file, entry and key that are wrong, or a name that comes twice.
    """
    file = Path(path).expanduser()
    content = read_yaml(path, "multi_turn.interaction_config_path")
    found = content.get("interaction") if isinstance(content, Mapping) else None
    if not isinstance(found, list) or not found:
        raise ConfigError(
            f"'{path}' must have a list 'interaction:' with at least one entry, such as "
            f"'- class_name: package.module.Class', got {_shown(content or None)}."
        )

    interactions: dict[str, BaseInteraction] = {}
    for entry in [_read(number, value, file) for number, value in enumerate(found, start=1)]:
        require_methods(entry.cls, _METHODS, f"{entry.where}: class_name")
        if entry.name in interactions:
            raise ConfigError(
                f"{entry.where}: Duplicate interaction name '{entry.name}' found. Set another "
                "`name:`."
            )
        interactions[entry.name] = _make(entry)
    return interactions


def _read(number: int, entry: Any, file: Path) -> _Entry:
    """Check the keys of an entry and import its class. Raises ConfigError."""
    where = f"interaction entry {number} of '{file}'"
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} must be keys and values, got {_shown(entry)}.")
    refuse_unknown(where, entry, _KEYS)

    class_name = entry.get("class_name")
    if not isinstance(class_name, str):
        raise ConfigError(
            f"{where}: class_name must be 'package.module.Class' or 'file.py:Class', got "
            f"{_shown(class_name)}."
        )
    config = entry.get("config")
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"{where}: config must be keys and values, got {_shown(config)}.")
    name = entry.get("name")
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"{where}: name must be a text, got {_shown(name)}.")

    try:
        cls = load_class(find_class(class_name, folder_of(file)))
    except (ConfigError, MissingDependencyError) as error:
        raise type(error)(f"{where}: class_name: {error}") from error
    return _Entry(where=where, cls=cls, name=name or default_name(cls), config=dict(config or {}))


def _make(entry: _Entry) -> BaseInteraction:
    cls = entry.cls
    if cls.generate_response is BaseInteraction.generate_response:  # pyright: ignore[reportAttributeAccessIssue]
        raise ConfigError(
            f"{entry.where}: {cls.__name__} must override generate_response(instance_id, messages, "
            "**kwargs), which answers the model and returns (should_terminate, content, score, "
            "data)."
        )
    try:
        made = call_by_name(cls, config={**entry.config, "name": entry.name})
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise ConfigError(
            f"{entry.where}: {cls.__name__}(config) raised {describe_error(error)}"
        ) from error
    require_calls(made, _CALLS, entry.where)
    misspelled = misspelled_settings(entry.config, ["timeout_s"], cls, BaseInteraction)
    for key, setting in misspelled.items():
        say_once(
            f"{entry.where}: config.{key} is no setting of interactions, and no method of "
            f"{cls.__name__} names it. Nearest known: {setting}.",
            logging.WARNING,
        )
    return made


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__}: {str(value)[:80]!r}"


def get_interaction_class(class_name: str) -> type:
    """Import the class of "package.module.Class" or "file.py:Class"."""
    return load_class(class_name)


def default_name(cls: type) -> str:
    """Return the name of an entry that gives none: "gsm8k" for Gsm8kInteraction."""
    short = cls.__name__.removesuffix("Interaction") or cls.__name__
    return short.lower()


def choose_interaction(
    interactions: Mapping[str, BaseInteraction], kwargs: Mapping[str, Any] | None
) -> str:
    """Return the name of the interaction that a row's `interaction_kwargs` ask for.

    Without a name it is the only interaction of the run, or else the one called "gsm8k".

    Raises DataError for an unknown name, or for none where there is a choice.
    """
    name = (kwargs or {}).get("name")
    if name is None and len(interactions) == 1:
        return next(iter(interactions))
    if name is None and DEFAULT_NAME in interactions:
        return DEFAULT_NAME
    if name in interactions:
        return str(name)

    known = ", ".join(sorted(interactions)) or "none"
    fact = "has no name" if name is None else f"names '{name}'"
    raise DataError(
        f"interaction_kwargs of a row {fact}, but must name one of the interactions of "
        f"multi_turn.interaction_config_path. Known: {known}."
    )
