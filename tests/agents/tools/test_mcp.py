import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.agents.tools.mcp_configs import STDIO, calls_of, write_config, write_servers
from verl.agents.tools import ToolSet, mcp_clients
from verl.agents.tools.mcp import MCPBaseTool
from verl.agents.tools.mcp_clients import ClientManager, MCPClientManager, read_servers
from verl.utils.errors import ConfigError, MissingDependencyError

HERE = Path(__file__).parent

# It never answers, and ends with its standard input.
SILENT = {"command": sys.executable, "args": ["-c", "import sys; list(sys.stdin)"]}


class Shouting(MCPBaseTool):
    """A user's class with its own parser of answers."""

    def _parse_tool_result(self, content):
        return content[0].text.upper() + "!", {"parts": len(content)}


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    path = write_config(tmp_path_factory.mktemp("mcp"), STDIO)
    made = ToolSet.from_config(path, timeout_s=30)
    yield made
    made.close()


def test_the_tools_of_a_server_have_its_schemas(tools):
    assert tools.names[:6] == ["add", "search", "fail", "picture", "part_of_picture", "leave"]
    (schema,) = tools.schemas(["add"])
    assert schema["function"]["description"] == "Add two numbers."
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    assert schema["function"]["parameters"]["properties"]["a"]["type"] == "integer"


def test_calls_reach_the_server(tools):
    results = calls_of(
        tools,
        ("add", {"a": 1, "b": 2}),
        ("search", {"query": "x"}),
        ("fail", {}),
        ("picture", {}),
        ("environment", {"name": "KEY"}),
    )
    assert [result.outcome for result in results] == ["ok", "ok", "error", "ok", "ok"]
    assert results[0].text == "3"
    assert results[1].metrics == {"query_count": 1, "total_results": 2}
    assert "broken" in results[2].text
    assert results[3].images[0].size == (1, 1)
    assert results[4].text == "value"


def test_parts_without_a_text_are_shown_to_the_model(tools):
    resources, structured = calls_of(tools, ("resources", {}), ("structured", {}))
    assert resources.text == "in a resource\n[b: file:///b]\n[audio]"
    assert structured.text == '{"sum": 3}'


def test_the_models_mistakes_count_as_malformed(tools):
    wrong, refused, failed = calls_of(
        tools, ("add", {"a": "x", "b": 2}), ("strict", {}), ("fail", {})
    )
    assert (wrong.outcome, wrong.text) == ("malformed", "Error: broken")
    assert (refused.outcome, refused.text) == ("malformed", "Error: no such parameter")
    assert failed.outcome == "error"


def test_a_server_that_does_not_answer_counts_as_a_timeout(tmp_path):
    path = write_config(tmp_path, STDIO, timeout=0.2)
    tools = ToolSet.from_config(path, timeout_s=30)
    late, after = calls_of(tools, ("hang", {}), ("add", {"a": 1, "b": 2}))
    tools.close()
    assert (late.outcome, after.text) == ("timeout", "3")
    assert late.text == "Error: the tool 'hang' did not answer within 0.2 s"


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([{"name": "t"}], "small: the MCP server breaks the protocol: .*inputSchema: Field requ"),
        ([], "have no tools"),
        (
            [{"name": "t", "inputSchema": {"type": "object", "properties": {"a": True}}}],
            "the server's tool 't': .*properties.a: Input should be",
        ),
    ],
)
def test_wrong_lists_of_tools_are_refused(tmp_path, listed, message):
    server = {**STDIO, "args": [*STDIO["args"], json.dumps(listed)]}
    with pytest.raises(ConfigError, match=f"tools entry 1 .*{message}"):
        ToolSet.from_config(write_config(tmp_path, server))


class NoLicence(MCPBaseTool):
    """A user's class that cannot be made."""

    def __init__(self, config, tool_schema):
        raise RuntimeError("no licence")


def test_a_class_that_cannot_be_made_is_named_and_its_servers_end(tmp_path):
    before = set(psutil.Process().children(recursive=True))
    path = write_config(tmp_path, STDIO, f"{NoLicence.__module__}.NoLicence")
    expected = r"tools entry 1 .*tool 'add': NoLicence\(.*\) raised RuntimeError: no licence"
    with pytest.raises(ConfigError, match=expected):
        ToolSet.from_config(path)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_server_that_never_lists_its_tools_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(mcp_clients, "START_TIMEOUT_S", 0.3)
    before = set(psutil.Process().children(recursive=True))
    path = write_config(
        tmp_path, {"command": sys.executable, "args": ["-c", "import time; time.sleep(60)"]}
    )
    with pytest.raises(ConfigError, match=r"did not list its tools within 0\.3 s"):
        ToolSet.from_config(path)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_server_that_is_still_connecting_ends_where_another_one_fails(tmp_path):
    before = set(psutil.Process().children(recursive=True))
    missing = {"command": str(tmp_path / "missing")}
    deaf = {"command": sys.executable, "args": ["-c", "import time; time.sleep(60)"]}
    path = write_servers(tmp_path, deaf=deaf, missing=missing)
    manager = MCPClientManager()
    with pytest.raises(ConfigError, match="missing: the MCP server cannot be reached: FileNotF"):
        manager.connect(path, 10.0, None)
    manager.close()
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_cancelled_connection_ends_its_server(tmp_path):
    before = set(psutil.Process().children(recursive=True))
    path = write_servers(tmp_path, silent=SILENT)
    manager = MCPClientManager()

    def started():
        return set(psutil.Process().children(recursive=True)) - before

    async def until(condition):
        deadline = time.monotonic() + 20
        while not condition() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert condition()

    async def run():
        connecting = asyncio.ensure_future(manager.initialize(path))
        await until(started)
        connecting.cancel()
        await until(lambda: not started())

    asyncio.run(run())
    manager.close()


def test_callers_that_connect_at_once_share_a_server_or_get_its_error(tmp_path):
    before = set(psutil.Process().children(recursive=True))
    path = write_servers(tmp_path, small=STDIO)
    manager = MCPClientManager()

    async def both(file):
        calls = [manager.initialize(file) for _ in range(2)]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert asyncio.run(both(path)) == [None, None]
    assert len(set(psutil.Process().children(recursive=True)) - before) == 1
    path = write_servers(tmp_path, gone={"command": sys.executable, "args": ["-c", "pass"]})
    errors = asyncio.run(both(path))
    manager.close()
    assert all(isinstance(error, ConfigError) for error in errors)
    assert all("gone: the MCP server cannot be reached: MCPError" in str(e) for e in errors)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_an_older_package_is_named(tmp_path, monkeypatch):
    monkeypatch.delattr("mcp.Client")
    with pytest.raises(MissingDependencyError, match="'mcp' in version 2 or later, found"):
        ToolSet.from_config(write_config(tmp_path, STDIO))


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"command": "my-server --port 80"}, "the program alone as command, and its arguments"),
        ({"command": "/nowhere/server"}, "Correct command, or cwd, of its entry"),
        ({"command": sys.executable, "args": ["-c", "pass"]}, "Its program ended, and its standar"),
        ({"command": sys.executable, "args": ["-c", "input()"]}, "messages of MCP alone"),
    ],
)
def test_a_command_that_gives_no_tools_has_a_way_out(tmp_path, monkeypatch, server, message):
    if "input()" in server.get("args", []):
        server = {**SILENT}
        monkeypatch.setattr(mcp_clients, "START_TIMEOUT_S", 0.3)
    with pytest.raises(ConfigError, match=message):
        ToolSet.from_config(write_config(tmp_path, server))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"timeout": "abc"}, "config.timeout: expected seconds above 0, got 'abc'"),
        ({"timeout": 0}, "config.timeout: expected seconds above 0, got 0"),
        ({"timeout": None}, "config.timeout: expected seconds above 0, got None"),
        ({"rate_limit": "x"}, "config.rate_limit: expected calls a second, .* got 'x'"),
        ({"rate_limit": -1}, "config.rate_limit: expected calls a second, .* got -1"),
    ],
)
def test_wrong_limits_are_refused(tmp_path, config, message):
    path = write_config(tmp_path, STDIO)
    content = json.loads(path.read_text())
    content["tools"][0]["config"].update(config)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"tools entry 1 .*{message}"):
        ToolSet.from_config(path)


def test_a_part_of_an_image_is_an_error_of_the_call(tools):
    (part,) = calls_of(tools, ("part_of_picture", {}))
    assert part.outcome == "error"
    assert "the server's image of the type image/png cannot be read" in part.text


def test_a_users_class_reads_answers_and_its_servers_end_with_the_tools(tmp_path):
    before = set(psutil.Process().children(recursive=True))
    name = f"{Shouting.__module__}.Shouting"
    path = write_config(tmp_path, STDIO, name, tool_selected_list=["search"])
    tools = ToolSet.from_config(path, timeout_s=30)
    started = set(psutil.Process().children(recursive=True)) - before
    (result,) = calls_of(tools, ("search", {"query": "x"}))
    tools.close()
    assert tools.names == ["search"]
    assert result.text == '{"RESULTS": ["X 1", "X 2"]}!'
    assert result.metrics == {"parts": 1}

    assert started
    deadline = time.monotonic() + 5
    while any(process.is_running() for process in started) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(process.is_running() for process in started)


@pytest.fixture(scope="module")
def url():
    """Start a server over HTTP and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(HERE / "http_mcp_server.py"), str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest.mark.parametrize("transport", ["http", "sse"])
def test_a_server_over_http(tmp_path, url, transport):
    address = url if transport == "http" else url.replace("/mcp", "/sse")
    server = {"url": address, "auth_token": "secret", "type": transport}
    path = write_config(tmp_path, server)
    tools = ToolSet.from_config(path, timeout_s=30)
    (result,) = calls_of(tools, ("add", {"a": 1, "b": 2}))
    tools.close()
    assert result.text == "3"


def test_the_manager_can_be_used_as_in_verl(tmp_path, url):
    write_config(tmp_path, {"url": url})

    async def run():
        manager = MCPClientManager()
        await manager.initialize(tmp_path / "servers.json", rate_limit=100.0)
        schemas = await manager.fetch_tool_schemas(["add"])
        result = await manager.call_tool("add", {"a": 1, "b": 2}, timeout=20)
        await asyncio.to_thread(manager.close)
        return schemas, result

    schemas, result = asyncio.run(run())
    assert [schema["function"]["name"] for schema in schemas] == ["add"]
    assert result.content[0].text == "3"
    assert isinstance(ClientManager, MCPClientManager)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a JSON file"),
        ("{}", "under the key 'mcpServers'"),
        ('{"mcpServers": {"a": {}}}', "server 'a': expected one of 'url' and 'command'"),
        ('{"mcpServers": {"a": {"url": "x", "token": "y"}}}', "server 'a': unknown key 'token'"),
    ],
)
def test_wrong_files_of_servers_are_refused(tmp_path, content, message):
    path = tmp_path / "servers.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_servers(path)


def test_wrong_entries_are_refused(tmp_path, url):
    path = write_config(tmp_path, {"command": "/nowhere/server"})
    with pytest.raises(ConfigError, match=r"tools.yaml, tools entry 1 .*cannot be reached"):
        ToolSet.from_config(path)
    path = write_config(tmp_path, {"url": url}, "tests.agents.tools.user_tools.OldCounter")
    with pytest.raises(ConfigError, match="needs a subclass of MCPBaseTool"):
        ToolSet.from_config(path)
    path = write_config(tmp_path, {"url": url}, tool_selected_list=["ad"])
    with pytest.raises(ConfigError, match="tool_selected_list names 'ad'.*add"):
        ToolSet.from_config(path)
