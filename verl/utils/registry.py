"""The registry of every kind of part that a user may add by a decorator."""

import difflib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from enum import Enum
from typing import Any, Generic, TypeVar

from verl.utils.errors import ConfigError

T = TypeVar("T")


def nearest_names(name: str, known: list[str]) -> str:
    """Return at most three known names close to `name`, or all if none is close.

    A name that differs in capitals alone comes first. Returns "none" if no name is known.
    """
    close = [other for other in known if other.lower() == name.lower()]
    close = close or difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return ", ".join(close or sorted(known)) or "none"


def misspelled(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` seems to mean; None where none is that close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.8)
    return close[0] if close else None


def refuse_unknown(place: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise ConfigError, which begins with `place`, for a key that is not known."""
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{place}: unknown key '{key}'. Nearest known: "
                f"{nearest_names(str(key), list(known))}."
            )


def is_loaded_again(known: object, entry: object) -> bool:
    """Return whether two objects are one definition, of a file with two module names."""
    place = _place_of(known)
    if None in place or place != _place_of(entry):
        return False
    return known.__module__ != entry.__module__


def _place_of(entry: object) -> tuple[Any, Any]:
    """Return the file and the qualified name of a function or class, or None for each."""
    module = sys.modules.get(getattr(entry, "__module__", None) or "")
    return getattr(module, "__file__", None), getattr(entry, "__qualname__", None)


class Registry(Generic[T]):
    """Map names to objects of one kind. Errors use `kind` as the name of that kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Register the decorated object under a name: `@registry.register("rloo")`.

        Raises ConfigError if another object has that name, or if `name` is none, as of a decorator
        without parentheses. A file that is imported by its path and by its module name defines its
        objects twice; the first ones stay.
        """
        if not isinstance(name, str) or not name:
            own_name = getattr(name, "__name__", "my_part")
            raise ConfigError(
                f'A {self.kind} is registered under a name: @register("{own_name}"), got {name!r}.'
            )

        def add(entry: T) -> T:
            known = self._entries.get(name, entry)
            if is_loaded_again(known, entry):
                return entry
            if known is not entry:
                raise ConfigError(
                    f"{self.kind} '{name}' has already been registered; give yours another name."
                )
            self._entries[name] = entry
            return entry

        return add

    def remove(self, name: str) -> T:
        """Remove an entry and return it."""
        self.get(name)
        return self._entries.pop(name)

    def get(self, name: str) -> T:
        """Return an entry. Raises ConfigError, with the nearest names, for an unknown one."""
        if name not in self._entries:
            raise ConfigError(
                f"Unknown {self.kind} '{name}'. Nearest known: {nearest_names(name, list(self))}."
            )
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)


class RegistryDict(MutableMapping[str, Any]):
    """A view of a registry as a dictionary, as verl 0.5 has them.

    `show(name)` returns the value under a name, and `wrap(value)` returns the entry to register for
    a value. Names may be members of an Enum. Deleting or clearing changes the registry itself;
    setting the previous value again undoes that.
    """

    def __init__(
        self, registry: Registry[Any], wrap: Callable[[Any], Any], show: Callable[[str], Any]
    ) -> None:
        self._registry = registry
        self._wrap = wrap
        self._show = show
        # name -> (shown value, registered entry) of everything that was removed under it
        self._removed: dict[str, list[tuple[Any, Any]]] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return self._show(plain(name))

    def __setitem__(self, name: str, entry: Any) -> None:
        name = plain(name)
        if name in self and self._show(name) is entry:
            return

        for shown, registered in self._removed.get(name, ()):
            if shown is entry:
                self._registry.register(name)(registered)
                return
        self._registry.register(name)(self._wrap(entry))

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        name = plain(name)
        shown = self._show(name)
        registered = self._registry.remove(name)
        self._removed.setdefault(name, []).append((shown, registered))

    def __contains__(self, name: object) -> bool:
        return plain(name) in self._registry

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._registry))

    def __len__(self) -> int:
        return len(list(self._registry))

    def copy(self) -> dict[str, Any]:
        """Return a plain dictionary with the same values."""
        return dict(self)


def plain(name: Any) -> Any:
    """Return the value of a member of an Enum, and any other name as it is."""
    return name.value if isinstance(name, Enum) else name
