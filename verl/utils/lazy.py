"""Public names of a package that are imported on first use (PEP 562)."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], *, old_names: bool = False
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module that offers names of other modules.

    Args:
        package: name of the module that offers them.
        homes: the module of each name.
        old_names: whether it also offers the names of verl 0.5 that `verl.compat` lists for it.
    """

    def get(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        if old_names:
            compat = importlib.import_module("verl.compat")
            if compat.is_old_name(package, name):
                return compat.find_old_name(package, name)
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    return get
