"""A hundred trajectories with one harmful call in five; bench/tool_chaos.py has more."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import psutil

from verl.agents.tools import ToolSet

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))

import tool_chaos

TIMEOUT_S = 0.4
GRACE_S = 0.6
SLACK_S = 10.0  # for a busy machine
OUTCOMES = ("ok", "error", "timeout", "crashed")


def test_all_trajectories_end_and_every_outcome_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("verl.agents.tools.processes.GRACE_S", GRACE_S)
    monkeypatch.setattr(tool_chaos, "TURNS", 2)
    me = psutil.Process()
    others = set(me.children(recursive=True))
    tools = ToolSet.from_config(tool_chaos.write_config(str(tmp_path), TIMEOUT_S), num_processes=6)
    asyncio.run(tool_chaos.run(tools, 4, 4))
    tools.counts(reset=True)
    threads, memory = threading.active_count(), me.memory_info().rss

    results = asyncio.run(tool_chaos.run(tools, 100, 50))

    assert len(results) == 200
    assert {harm for harm, _ in results} == {"none", *tool_chaos.HARMS}
    assert max(result.seconds for _, result in results) < TIMEOUT_S + GRACE_S + SLACK_S
    hanging = [result for harm, result in results if harm in ("await", "sleep", "busy", "stuck")]
    assert {result.outcome for result in hanging} <= {"timeout", "crashed"}
    dying = [result for harm, result in results if harm in ("_exit", "kill")]
    assert "ok" not in {result.outcome for result in dying}
    harmless = [result.outcome for harm, result in results if harm == "none"]
    # A dead process ends its other calls, too, and a busy machine is late.
    assert set(harmless) <= {"ok", "crashed", "timeout"}
    assert "ok" in harmless

    counts = tools.counts()
    for outcome in OUTCOMES:
        counted = sum(counts.get(f"tools/{name}/{outcome}", 0) for name in tools.names)
        assert counted == [result.outcome for _, result in results].count(outcome)

    assert threading.active_count() <= threads  # those of earlier tests may end meanwhile
    assert me.memory_info().rss - memory < 80 * 1024**2  # one flood is 100 MB
    tools.close()
    assert set(me.children(recursive=True)) <= others


def test_helper_processes_import_little():
    """Keep the start of helper processes fast, as there may be many of them."""
    program = (
        "import sys, verl.agents.tools.process_main\n"
        "heavy = {'torch', 'transformers', 'omegaconf', 'mcp', 'urllib3'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"
