"""The JSON file of MCP servers that a tool configuration names.

    {"mcpServers": {"files": {"command": "npx", "args": ["-y", "server"], "env": {"KEY": "..."}},
                    "web": {"url": "https://host/mcp", "auth_token": "..."}}}

A server with `command` is started and spoken to over its standard streams; one with `url` over
streamable HTTP, or over server-sent events where its `type` (or `transport`) is "sse". One with
`"disabled": true` is left out, as other programs that read such files do.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.utils.errors import ConfigError
from verl.utils.registry import refuse_unknown

_TEXTS = ("command", "cwd", "url", "auth_token", "type", "transport")
_SERVER_KEYS = {*_TEXTS, "args", "env", "headers", "disabled"}
# Keys for other programs that read such files; they have no meaning here.
_IGNORED_KEYS = {"autoApprove", "timeout", "description"}
_STDIO = "stdio"
_TRANSPORTS = (_STDIO, "http", "streamable-http", "streamable_http", "sse")


def read_servers(path: str | Path) -> dict[str, dict[str, Any]]:
    """Return {name: settings} of the servers in a JSON file, without those that are disabled.

    Raises:
        ConfigError: the file, an entry or a key is wrong.
    """
    try:
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"mcp.mcp_servers_config_path: '{path}' is not a JSON file of MCP servers: {error}."
        ) from error

    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(
            f"'{path}': expected servers under the key 'mcpServers': {{name: {{url: ...}}}} or "
            "{name: {command: ..., args: [...]}}."
        )

    enabled = {}
    for name, config in servers.items():
        _check_server(f"'{path}', server '{name}'", config)
        if not config.get("disabled"):
            enabled[name] = config
    if not enabled:
        raise ConfigError(f"'{path}': every server is disabled. Set \"disabled\": false for one.")
    return enabled


def transport_of(config: dict[str, Any]) -> str | None:
    """Return the transport that a server's settings name; programs disagree on the key."""
    return config.get("type") or config.get("transport")


def _check_server(place: str, config: Any) -> None:
    """Check the keys of one server, and the types of their values. Raises ConfigError."""
    if not isinstance(config, dict) or ("url" in config) == ("command" in config):
        raise ConfigError(f"{place}: expected one of 'url' and 'command'.")
    read = [key for key in config if key not in _IGNORED_KEYS]
    refuse_unknown(place, read, _SERVER_KEYS)

    for key, value in _texts_of(place, config):
        if not isinstance(value, str):
            got = json.dumps(value)
            raise ConfigError(f"{place}: {key} must be a text in quotes, got {got}.")

    url = config.get("url")
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"{place}: url must begin with http:// or https://, got '{url}'.")

    transport = transport_of(config)
    if transport is None:
        return
    if transport not in _TRANSPORTS:
        known = ", ".join(_TRANSPORTS)
        raise ConfigError(f"{place}: type must be one of {known}, got '{transport}'.")

    key = "command" if "command" in config else "url"
    if (transport == _STDIO) != (key == "command"):
        raise ConfigError(
            f"{place}: a server with '{key}' cannot have the type '{transport}'. 'command' goes "
            f"with {_STDIO}, 'url' with the others. Leave the type out, or correct it."
        )


def _texts_of(place: str, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Give (key, value) of everything in an entry that must be a text.

    Raises ConfigError for lists and mappings that are none.
    """
    for key in _TEXTS:
        is_needed = key in ("command", "url")
        if key not in config:
            continue
        if config[key] is not None or is_needed:  # null stands for no value
            yield key, config[key]

    args = config.get("args") or []
    if not isinstance(args, list):
        got = json.dumps(args)
        raise ConfigError(f'{place}: args must be a list such as ["-y", "my-server"], got {got}.')
    for number, value in enumerate(args):
        yield f"args[{number}]", value

    for key in ("env", "headers"):
        values = config.get(key) or {}
        if not isinstance(values, dict):
            got = json.dumps(values)
            example = '{"KEY": "value"}'
            raise ConfigError(f"{place}: {key} must be a mapping such as {example}, got {got}.")
        for name, value in values.items():
            yield f"{key}.{name}", value
