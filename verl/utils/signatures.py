"""Which keywords a function takes, for calls of users' functions and of several versions of a
library."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any

from verl.utils.errors import ConfigError
from verl.utils.registry import misspelled

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def keywords_of(function: Callable[..., Any]) -> list[str]:
    """Return the keywords that a function declares, in order. `**kwargs` is none."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in _BY_NAME]


def declares(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function declares a keyword of this name."""
    return name in keywords_of(function)


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Return whether a function has `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def taken_by(function: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords that a function accepts: all of them if it takes `**kwargs`."""
    if takes_any_keyword(function):
        return dict(keywords)
    names = keywords_of(function)
    return {name: value for name, value in keywords.items() if name in names}


def missing_of(function: Callable[..., Any], keywords: Iterable[str]) -> list[str]:
    """Return the parameters without a default that a function declares and `keywords` lack."""
    given = set(keywords)
    missing = []
    for parameter in inspect.signature(function).parameters.values():
        is_required = parameter.kind in _BY_NAME and parameter.default is parameter.empty
        if is_required and parameter.name not in given:
            missing.append(parameter.name)
    return missing


def check_keywords(function: Callable[..., Any], keywords: Iterable[str], name: str) -> None:
    """Raise ConfigError for a function or class that cannot be called with these keywords."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have no signature; the first call will show a mistake
        return
    names = list(keywords)
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ConfigError(
            f"{name} is called with the keywords {', '.join(names)}; its signature is {signature}: "
            f"{error}. Give its parameters these names."
        ) from error


def call_by_name(function: Callable[..., Any], **keywords: Any) -> Any:
    """Call a function or class by these keywords, or by position if it has other names for them."""
    try:
        inspect.signature(function).bind(**keywords)
        has_names = True
    except (TypeError, ValueError):  # ValueError: a class of C without a signature
        has_names = False
    return function(**keywords) if has_names else function(*keywords.values())


def names_key(function: Callable[..., Any], name: str) -> bool:
    """Return whether the code of a function holds this text, such as `kwargs["name"]`.

    Functions that it defines count as well, and so do their parameters.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and _holds(code, name)


def class_names_key(cls: type, name: str, base: type) -> bool:
    """Return whether a method of a class holds this text; those of `base` do not count."""
    for own in cls.__mro__:
        if own in (base, object):
            continue
        methods = filter(inspect.isroutine, vars(own).values())
        if any(names_key(method, name) for method in methods):
            return True
    return False


def misspelled_settings(
    config: Iterable[Any], settings: Iterable[str], cls: type, base: type
) -> dict[str, str]:
    """Return {key: setting} for keys of an object's configuration that seem to be misspelled.

    Args:
        config: the keys.
        settings: keys that the package reads.
        cls: class of the object. A key that one of its methods names is its own.
        base: class whose methods do not count.
    """
    known = list(settings)
    found = {}
    for key in map(str, config):
        meant = misspelled(key, known)
        if meant is not None and meant != key and not class_names_key(cls, key, base):
            found[key] = meant
    return found


def _holds(constant: Any, name: str) -> bool:
    if isinstance(constant, CodeType):
        num_parameters = constant.co_argcount + constant.co_kwonlyargcount
        if name in constant.co_varnames[:num_parameters]:
            return True
        return any(_holds(each, name) for each in constant.co_consts)

    if isinstance(constant, (tuple, frozenset)):  # keys of a pattern, or of `in (...)`
        return any(_holds(each, name) for each in constant)
    return isinstance(constant, str) and constant == name
