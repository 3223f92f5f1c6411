"""Interactions of a YAML file, and the one that a row picks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.agents.entries import load_class, read_entries, require_calls, require_methods
from verl.agents.interactions.base import BaseInteraction
from verl.utils.errors import ConfigError, DataError, describe_error
from verl.utils.signatures import call_by_name

DEFAULT_NAME = "gsm8k"  # picked by rows without a name, as in verl 0.5
_METHODS = ("start_interaction", "generate_response", "finalize_interaction")
_CALLS = {
    "start_interaction": ("instance_id",),
    "generate_response": ("instance_id", "messages"),
}


def initialize_interactions_from_config(path: str | Path) -> dict[str, BaseInteraction]:
    """Make the interactions of a YAML file, by name.

        interaction:
          - name: gsm8k             # default: the class without "Interaction", in lower case
            class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction   # or file.py:Class
            config: {}              # handed to the class, with `name`

    Raises:
        ConfigError: with the file, entry and key that are wrong, or a name that comes twice.
    """
    interactions: dict[str, BaseInteraction] = {}
    for entry in read_entries(path):
        require_methods(entry.cls, _METHODS, f"{entry.where}: class_name")
        name = entry.name or default_name(entry.cls)
        if name in interactions:
            raise ConfigError(
                f"{entry.where}: Duplicate interaction name '{name}' found. Set another `name:`."
            )
        interactions[name] = _make(entry.cls, {**entry.config, "name": name}, entry.where)
    return interactions


def _make(cls: type, config: dict[str, Any], where: str) -> BaseInteraction:
    if cls.generate_response is BaseInteraction.generate_response:  # pyright: ignore[reportAttributeAccessIssue]
        raise ConfigError(
            f"{where}: {cls.__name__} must override generate_response(instance_id, messages, "
            "**kwargs), which answers the model and returns (should_terminate, content, score, "
            "data)."
        )
    try:
        made = call_by_name(cls, config=config)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise ConfigError(
            f"{where}: {cls.__name__}(config) raised {describe_error(error)}"
        ) from error
    require_calls(made, _CALLS, where)
    return made


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
