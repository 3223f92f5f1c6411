"""How one configuration key is declared: its default, its help line, and whether this version
honours it.

Everything stays in the dataclass field's metadata, so that checks, warnings and the table of keys
read one source.
"""

import copy
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

_METADATA_KEY = "verl_setting"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Facts about one key, apart from its type and default.

    At most one of `no_effect` and `planned` is set.
    """

    help: str
    # accepted; the reason why it changes nothing, logged when the user changes it
    no_effect: str | None = None
    planned: str | None = None  # refused unless it has its default; the work it would take
    # values other than the default that pass without a warning or an error
    also: tuple[Any, ...] = ()
    choices: tuple[str, ...] | None = None
    above: float | None = None  # exclusive lower bound
    at_least: float | None = None
    at_most: float | None = None
    finite: bool = False  # infinity is refused; NaN always is
    # the key that gives the value when this one is unset (".x": in the same section), or an
    # interpolation
    follows: str | None = None
    # the key of which this one is another name; ".x": in the same section
    alias_of: str | None = None
    # an explicit null is accepted, though the type has none, and leaves the default
    null_is_default: bool = False
    is_path: bool = False  # a file or folder: `~` is expanded
    many: bool = False  # one value or a list of them is accepted; a list after loading


def setting(default: Any, help: str, **details: Any) -> Any:
    """Declare a configuration key as a dataclass field.

    Mutable defaults (lists, dicts, sections) are copied for each instance.
    """
    metadata = {_METADATA_KEY: Setting(help=help, **details)}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def alias(of: str, help: str = "old name") -> Any:
    """Declare another name of the key `of` (".x": in the same section)."""
    return setting(None, help, alias_of=of)


def as_in(section: type, name: str) -> Any:
    """Declare a field as the key `name` of another section is declared."""
    original = next(each for each in fields(section) if each.name == name)
    if original.default_factory is not MISSING:
        return field(default_factory=original.default_factory, metadata=original.metadata)
    return field(default=original.default, metadata=original.metadata)


def setting_of(dataclass_field: Any) -> Setting | None:
    """Return the Setting of a dataclass field, or None for a section."""
    return dataclass_field.metadata.get(_METADATA_KEY)
