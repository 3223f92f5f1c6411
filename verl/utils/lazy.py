"""Public names of a package that are imported on first use (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], *, old_names: bool = False
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module that offers names of other modules.

    `dir()` of a module with `homes` lists its `__all__`.

    Args:
        package: name of the module that offers them.
        homes: the module of each name.
        old_names: whether it also offers the names of verl 0.5 that `verl.compat` lists for it.
    """

    def get(name: str) -> Any:
        if name in homes:
            return getattr(_imported(homes[name], f"{package}.{name}"), name)
        if old_names:
            compat = importlib.import_module("verl.compat")
            if compat.is_old_name(package, name):
                return compat.find_old_name(package, name)
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    if homes:
        module: Any = sys.modules[package]
        module.__dir__ = lambda: sorted(module.__all__)
    return get


def _imported(module: str, title: str) -> Any:
    """Import a module. Raises MissingDependencyError if a package that it needs is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # imported here, because `import verl` must be instant
        from verl.utils.errors import MissingDependencyError
        from verl.utils.imports import missing_package

        reason = missing_package(error)
        if reason is None:
            raise
        raise MissingDependencyError(f"{title}: {reason}") from error
