"""Read the files and import the classes that a user names, and check them."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from verl.utils.errors import ConfigError
from verl.utils.imports import load_extern_type, require, without_scheme
from verl.utils.yaml_text import explain_yaml


def read_yaml(path: str | Path, setting: str | None = None) -> Any:
    """Return the content of a YAML file, interpolations such as ${oc.env:HOME} resolved.

    Raises ConfigError, which begins with the `setting` that names the file, if it is missing, is
    not YAML, or has an interpolation without a value.
    """
    # Not at the top: processes of tools import this module, and read no files.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    file = Path(path).expanduser()
    if not file.is_file():
        expected = "Expected" if setting is None else f"{setting}: expected"
        raise ConfigError(f"{expected} a YAML file at '{path}', found none.")

    place = "" if setting is None else f"{setting}: "
    try:
        return OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}{explain_yaml(error, path)}") from error
    except (OmegaConfBaseException, OSError) as error:  # OSError: a text or a number alone
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{place}'{path}' cannot be read: {reason}") from error


def folder_of(path: str | Path) -> Path:
    """Return the folder of a YAML file, where relative paths in it are looked for as well."""
    return Path(path).expanduser().resolve().parent


def find_file(path: str, folder: Path) -> str:
    """Look for a relative file in the working directory, then in `folder`.

    Returns the path in `folder` of a file that is there alone, and any other path as it is.
    """
    file = Path(path).expanduser()
    neighbor = folder / file
    if not file.is_file() and neighbor.is_file():
        return str(neighbor)
    return path


def find_class(reference: str, folder: Path) -> str:
    """Return "file.py:Class" with the path of `find_file`, and "package.module.Class" as it is."""
    place, _, name = _split(reference)
    if Path(place).suffix != ".py":
        return reference
    return f"{find_file(place, folder)}:{name}"


def load_class(reference: str, key: str | None = None) -> type:
    """Import the class of "package.module.Class", or of "file.py:Class".

    Raises ConfigError for a module, file or class that does not exist.

    Args:
        key: of the configuration that holds the reference, for the error of a missing file.
    """
    place, _, name = _split(reference)
    if not names_a_class(reference):
        raise ConfigError(f"Expected 'package.module.Class' or 'file.py:Class', got {reference!r}.")

    found = load_extern_type(place, name, key)
    if not isinstance(found, type):
        raise ConfigError(f"{reference!r} must be a class, got {type(found).__name__}.")
    return found


def names_a_class(reference: str) -> bool:
    """Return whether a text is "package.module.Class" or "file.py:Class", not another library's
    id."""
    place, separator, name = _split(reference)
    return bool(separator and place) and name.isidentifier()


def class_or_maker(name: str, library: str, install: str) -> Callable[..., Any]:
    """Return the class that `name` names, or the `make` of a library for its id of this name.

    Raises ConfigError for a value that is no text, and MissingDependencyError with the command
    `install` where the library is not installed.
    """
    if not isinstance(name, str):
        raise ConfigError(
            "`env` of an environment must be 'package.module.Class', 'file.py:Class' or an id of "
            f"{library}, got {name!r}. Correct "
            "actor_rollout_ref.rollout.agent.environment.kwargs.env."
        )
    if names_a_class(name):
        return load_class(name)
    return partial(require(library, f"The environment '{name}'", install).make, name)


def require_keywords(make: Callable[..., Any], keywords: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError for keywords of an environment that its class or maker does not take."""
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # no signature: the first episode will show a mistake
        return
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise ConfigError(
            f"The keywords of the environment '{name}' do not fit: {error}. Correct "
            "actor_rollout_ref.rollout.agent.environment.kwargs."
        ) from error


def require_methods(cls: type, methods: Collection[str], where: str) -> None:
    """Raise ConfigError for a class that lacks one of the methods."""
    missing = [method for method in methods if not callable(getattr(cls, method, None))]
    if missing:
        raise ConfigError(
            f"{where}: class {cls.__name__} must have {', '.join(methods)}; it lacks "
            f"{', '.join(missing)}."
        )


def require_calls(made: object, calls: Mapping[str, Sequence[str]], where: str) -> None:
    """Raise ConfigError for an object whose methods do not take these arguments by position.

    Args:
        calls: names of the arguments, by method.
    """
    for name, arguments in calls.items():
        method = getattr(made, name)
        try:
            signature = inspect.signature(method)
        except (TypeError, ValueError):  # no signature: the first call will show a mistake
            continue

        try:
            signature.bind_partial(*arguments)
        except TypeError as error:
            raise ConfigError(
                f"{where}: {type(made).__name__}.{name} is called with ({', '.join(arguments)}); "
                f"its signature is {signature}: {error}."
            ) from error


def checked_roles(where: str, roles: Any) -> tuple[str, ...]:
    """Return the roles that a class declares.

    Raises ConfigError unless they are different names.
    """
    names = tuple(roles) if isinstance(roles, list | tuple) else ()
    texts = [name for name in names if isinstance(name, str) and name]
    if not isinstance(roles, list | tuple) or len(set(texts)) < len(names):
        raise ConfigError(
            f"{where}: `roles` must be a tuple of different names, such as ('player', 'judge'), "
            f"got {roles!r}."
        )
    return names


def _split(reference: str) -> tuple[str, str, str]:
    reference = without_scheme(reference)
    place, separator, name = reference.rpartition(":")
    return (place, separator, name) if separator else reference.rpartition(".")
