"""Hide secrets in text that is printed, logged, or sent to trackers and files.

Secrets are the user and password of an address, values that the configuration takes from
environment variables (`${oc.env:NAME}`), and entries of users' mappings with a name such as
`api_key`.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MASK = "***"
# User and password of an address. The second form is for passwords that should have been quoted: no
# port follows the colon.
_USERINFO = re.compile(r"(?<=://)(?:[^\s/?#'\"<>]+|[^\s/?#:'\"<>]*:(?!\d+(?:[/?#]|$))[^\s'\"<>]*)@")
_SECRET = r"(?:api_?key|access_?key|secret|passwd|password|token|credentials?)"
_IN_QUERY = re.compile(rf"(?i)([?&][\w.-]*{_SECRET}=)[^&\s#'\"<>]+")
_SECRET_NAME = re.compile(rf"(?i)(?:.*_)?{_SECRET}")
_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*['\"]?(\w+)")
_SHORTEST = 6  # characters; shorter values also occur within other words

# {value of an environment variable: the reference to it in the configuration}
_environment: dict[str, str] = {}


def remember_environment(value: Any) -> None:
    """Treat the environment variables that `value` of a configuration names as secrets."""
    if isinstance(value, Mapping):
        for entry in value.values():
            remember_environment(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            remember_environment(entry)
    elif isinstance(value, str):
        for name in _ENVIRONMENT.findall(value):
            if os.environ.get(name):
                _environment[os.environ[name]] = f"${{oc.env:{name}}}"


def masked(text: str) -> str:
    """Return a message without secrets.

    Values of environment variables that are paths of this machine stay, because a message about a
    file must name it.
    """
    secrets = [value for value in _environment if not _is_path(value)]
    return _without_passwords(_as_written(text, secrets))


def masked_values(values: Any) -> Any:
    """Return nested values of a configuration without secrets.

    A value from an environment variable becomes the reference to it again, which has the same
    meaning wherever that variable is set.
    """
    if isinstance(values, Mapping):
        return {name: _masked_entry(name, entry) for name, entry in values.items()}
    if isinstance(values, (list, tuple)):
        return [masked_values(entry) for entry in values]
    if not isinstance(values, str):
        return values
    if values in _environment:
        return _environment[values]
    return _without_passwords(_as_written(values, list(_environment)))


def _masked_entry(name: Any, entry: Any) -> Any:
    shown = masked_values(entry)
    is_secret = isinstance(shown, str) and _SECRET_NAME.fullmatch(str(name)) is not None
    if is_secret and shown and "${" not in shown:
        return MASK
    return shown


def _as_written(text: str, secrets: list[str]) -> str:
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, _environment[value])
    return text


def _without_passwords(text: str) -> str:
    if "://" in text:
        text = _USERINFO.sub(f"{MASK}@", text)
        text = _IN_QUERY.sub(rf"\1{MASK}", text)
    return text


def _is_path(value: str) -> bool:
    return value.startswith(("/", "~")) and Path(value).expanduser().exists()
