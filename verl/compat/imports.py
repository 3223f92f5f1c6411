"""Import optional packages and users' files, with the errors that callers of verl 0.5 catch."""

import functools
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.utils import imports
from verl.utils.errors import ConfigError


class MissingFileError(ConfigError, FileNotFoundError):
    """A file does not exist."""


class MissingNameError(ConfigError, AttributeError):
    """A file has no such name."""


class BrokenFileError(ConfigError, RuntimeError):
    """A file cannot be imported."""


def load_extern_type(file_path: str | None, type_name: str | None) -> Any:
    """Return the object `type_name` of a user's .py file or module; None without a path."""
    if not file_path:
        return None
    path = Path(imports.without_scheme(file_path)).expanduser()
    if path.suffix == ".py" and not path.is_file():
        raise MissingFileError(f"Expected a Python file at '{file_path}', found none.")

    try:
        imports.load_module(file_path)
    except ConfigError as error:
        raise BrokenFileError(f"Error loading module from '{file_path}': {error}") from error
    try:
        return imports.load_extern_type(file_path, str(type_name))
    except ConfigError as error:
        raise MissingNameError(str(error)) from error


def import_external_libs(external_libs: str | list[str] | None = None) -> None:
    """Import users' modules or .py files, which may register anything."""
    imports.import_user_code(external_libs)


def is_vllm_available() -> bool:
    """Return whether vLLM is installed."""
    return imports.is_installed("vllm")


def deprecated(replacement: str = "") -> Callable[[Any], Any]:
    """Decorate a function or class to warn when it is used, and name the `replacement`."""

    def decorate(used: Any) -> Any:
        message = f"{used.__module__}.{used.__qualname__} is deprecated."
        if replacement:
            message += f" Please use '{replacement}' instead."

        def warned(call: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(call)
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                warnings.warn(message, category=FutureWarning, stacklevel=2)
                return call(*args, **kwargs)

            return wrapped

        if not inspect.isclass(used):
            return warned(used)
        vars_of_class: Any = used
        vars_of_class.__init__ = warned(used.__init__)
        return used

    return decorate
