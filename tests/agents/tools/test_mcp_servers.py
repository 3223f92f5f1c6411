"""The JSON file of MCP servers: types of its values, and servers that are left out."""

import json

import pytest

from verl.agents.tools.mcp_servers import read_servers
from verl.utils.errors import ConfigError

URL = "http://localhost:8000/mcp"


def read(tmp_path, **servers):
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return read_servers(path)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"command": None}, "command must be a text in quotes, got null"),
        ({"command": ["npx", "-y"]}, r'command must be a text in quotes, got \["npx", "-y"\]'),
        ({"command": "npx", "args": "-y"}, r'args must be a list such as .*, got "-y"'),
        ({"command": "npx", "args": ["-p", 80]}, r"args\[1\] must be a text in quotes, got 80"),
        ({"command": "npx", "env": ["A=1"]}, r"env must be a mapping such as .*A=1"),
        ({"command": "npx", "env": {"PORT": 80}}, r"env.PORT must be a text in quotes, got 80"),
        ({"command": "npx", "type": "http"}, "a server with 'command' cannot have the type 'http'"),
        ({"url": URL, "type": "stdio"}, "a server with 'url' cannot have the type 'stdio'"),
        ({"url": URL, "type": "tcp"}, "type must be one of stdio, .* got 'tcp'"),
        ({"url": None}, "url must be a text in quotes, got null"),
        (
            {"url": "localhost:8000"},
            "url must begin with http:// or https://, got 'localhost:8000'",
        ),
        ({"url": URL, "headers": {"a": 1}}, "headers.a must be a text in quotes, got 1"),
        ({"url": URL, "auth_token": 5}, "auth_token must be a text in quotes, got 5"),
    ],
)
def test_wrong_values_are_named(tmp_path, server, message):
    with pytest.raises(ConfigError, match=f"servers.json', server 'a': {message}"):
        read(tmp_path, a=server)


def test_values_of_null_are_left_out(tmp_path):
    server = {"command": "npx", "args": None, "env": None, "cwd": None, "type": None}
    assert read(tmp_path, a=server) == {"a": server}


def test_disabled_servers_are_left_out(tmp_path):
    used = {"url": URL, "disabled": False}
    assert list(read(tmp_path, a=used, b={"command": "npx", "disabled": True})) == ["a"]
    with pytest.raises(ConfigError, match="every server is disabled"):
        read(tmp_path, a={"url": URL, "disabled": True})
