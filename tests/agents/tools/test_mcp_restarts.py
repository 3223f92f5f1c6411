"""MCP servers that end during a run, and are started again."""

import sys
import time

import psutil
import pytest

from tests.agents.tools.mcp_configs import STDIO, calls_of, write_config
from verl.agents.tools import ToolSet

ADD = ("add", {"a": 1, "b": 2})
LEAVE = ("leave", {})


def test_a_server_that_died_is_started_again(tmp_path):
    tools = ToolSet.from_config(write_config(tmp_path, STDIO), timeout_s=30)
    died, after = calls_of(tools, LEAVE, ADD)
    tools.close()
    assert died.outcome == "error"
    assert after.text == "3"


def test_a_server_that_cannot_be_started_again_is_named_once(tmp_path, caplog):
    (tmp_path / "once.py").write_text(
        "import pathlib, runpy, sys\n"
        "pathlib.Path(sys.argv.pop()).touch(exist_ok=False)\n"
        f"runpy.run_path({STDIO['args'][0]!r}, run_name='__main__')\n"
    )
    server = {"command": sys.executable, "args": [str(tmp_path / "once.py"), str(tmp_path / "ran")]}
    tools = ToolSet.from_config(write_config(tmp_path, server), timeout_s=30)
    results = calls_of(tools, LEAVE, ADD, ADD)
    tools.close()

    lost = "Error: McpToolError: the MCP server 'small' was lost, and cannot be reached again"
    assert [(result.outcome, result.text) for result in results] == [("error", lost)] * 3
    named = [each for each in caplog.messages if "Calls of its tools fail until then" in each]
    assert len(named) == 1
    assert "servers.json, small: the MCP server cannot be reached: MCPError" in named[0]
    assert "ExceptionGroup" not in caplog.text


def slow_to_restart(folder, pause_s):
    """Return a server that starts at once, and only after a pause when it starts again.

    Each start adds a line to the file `starts` of the folder.
    """
    starts = folder / "starts"
    starts.touch()
    (folder / "slow.py").write_text(
        "import pathlib, runpy, sys, time\n"
        f"starts = pathlib.Path({str(starts)!r})\n"
        "is_first = not starts.read_text()\n"
        "starts.write_text(starts.read_text() + 'start\\n')\n"
        f"time.sleep(0 if is_first else {pause_s})\n"
        f"runpy.run_path({STDIO['args'][0]!r}, run_name='__main__')\n"
    )
    return {"command": sys.executable, "args": [str(folder / "slow.py")]}


@pytest.mark.parametrize(("timeout", "timeout_s"), [(20, 1.0), (0.5, 30)])
def test_a_restart_outlives_the_calls_that_wait_for_it(tmp_path, caplog, timeout, timeout_s):
    path = write_config(tmp_path, slow_to_restart(tmp_path, 2), timeout=timeout)
    tools = ToolSet.from_config(path, timeout_s=timeout_s)
    results = calls_of(tools, LEAVE, ADD)
    deadline = time.monotonic() + 20
    while results[-1].outcome != "ok" and time.monotonic() < deadline:
        results += calls_of(tools, ADD)
    tools.close()

    reason = "the MCP server 'small' was lost, is starting again, and was not ready in time"
    assert [(result.outcome, result.text) for result in results[:2]] == [
        ("timeout", f"Error: {reason}")
    ] * 2
    assert results[-1].text == "3"
    assert (tmp_path / "starts").read_text().count("start") == 2
    named = [each for each in caplog.messages if "Calls of its tools end as timeouts" in each]
    assert len(named) == 1
    assert "servers.json, small: the MCP server was lost" in named[0]


def test_a_restart_ends_with_the_tools(tmp_path):
    before = set(psutil.Process().children(recursive=True))
    path = write_config(tmp_path, slow_to_restart(tmp_path, 60))
    tools = ToolSet.from_config(path, timeout_s=0.5)
    (result,) = calls_of(tools, LEAVE)
    started = set(psutil.Process().children(recursive=True)) - before
    tools.close()

    assert result.outcome == "timeout"
    assert started
    psutil.wait_procs(started, timeout=10)
    assert not any(process.is_running() for process in started)
