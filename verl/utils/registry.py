"""One kind of registry for everything a user may add by a decorator."""

import difflib
from collections.abc import Callable, Iterator, MutableMapping
from enum import Enum
from typing import Any, Generic, TypeVar

from verl.utils.errors import ConfigError

T = TypeVar("T")


def nearest_names(name: str, known: list[str], count: int = 3) -> str:
    """The known names closest to `name`, or all of them when none is close; "none" where there are
    none."""
    close = difflib.get_close_matches(name, known, n=count, cutoff=0.5)
    return ", ".join(close or sorted(known)) or "none"


class Registry(Generic[T]):
    """Names to objects of one kind (`kind` is how errors call them)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: `@registry.register("rloo")`. Registering another object under a taken name is
        an error."""

        def add(entry: T) -> T:
            if self._entries.get(name, entry) is not entry:
                raise ConfigError(
                    f"{self.kind} '{name}' is already registered; give yours another name."
                )
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> T:
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
    """A registry as a dictionary, as verl 0.5 has them: `show(name)` is what stands there, `wrap`
    of what is set is registered."""

    def __init__(
        self, registry: Registry[Any], wrap: Callable[[Any], Any], show: Callable[[str], Any]
    ) -> None:
        self._registry, self._wrap, self._show = registry, wrap, show

    def __getitem__(self, name: str) -> Any:
        if name not in self._registry:
            raise KeyError(name)
        return self._show(plain(name))

    def __setitem__(self, name: str, entry: Any) -> None:
        name = plain(name)
        if name not in self._registry or self._show(name) is not entry:
            self._registry.register(name)(self._wrap(entry))

    def __delitem__(self, name: str) -> None:
        raise ConfigError(
            f"What is registered stays; '{name}' cannot be deleted. Register yours by another name."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(list(self._registry))


def plain(name: str) -> str:
    """The text of a name that may be a member of an Enum."""
    return name.value if isinstance(name, Enum) else name
