import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.agents.tools.user_tools import call, one, schema
from verl.agents.tools import ToolSet
from verl.utils.errors import ConfigError

USER_TOOLS = "tests.agents.tools.user_tools"


def write_config(folder, *entries):
    """Write a tool configuration of (class, config) or (class, config, schema)."""
    tools = []
    for class_name, config, *rest in entries:
        entry = {"class_name": f"{USER_TOOLS}.{class_name}", "config": config}
        if rest:
            entry["tool_schema"] = rest[0]
        tools.append(entry)
    path = folder / "tools.yaml"
    path.write_text(json.dumps({"tools": tools}))
    return path


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    path = write_config(
        tmp_path_factory.mktemp("tools"),
        ("OldCounter", {"isolation": "thread"}, schema("near", n="integer")),
        ("Hostile", {"timeout_s": 0.5}),
        ("HostileInThread", {"timeout_s": 0.5}, schema("hostile_thread", harm="string")),
        ("OldCounter", {}),
        ("NewCounter", {}),
    )
    made = ToolSet.from_config(path, max_parallel_calls=4, num_processes=2)
    yield made
    made.close()


def test_schemas_keep_the_order_of_the_file(tools):
    assert tools.names == ["near", "hostile", "hostile_thread", "old_counter", "new_counter"]


def test_a_trajectory_stays_in_its_process_and_keeps_its_state(tools):
    async def run():
        session = await tools.open("test", {"old_counter": {"create_kwargs": {"start": 5}}})
        first = await one(session, "old_counter", n=1)
        second = await one(session, "old_counter", turn=1, n=1)
        near = await one(session, "near", turn=2, n=1)
        (new,) = await session.call([call("new_counter", n=2)], turn=3, agent_data={"a": 1})
        return first, second, near, new, await session.finish()

    first, second, near, new, rewards = asyncio.run(run())
    assert second.text == "total 7"
    assert first.metrics["pid"] == second.metrics["pid"] != os.getpid()
    assert near.metrics["pid"] == os.getpid()
    assert new.text == "total 2 for {'a': 1}"
    assert rewards == {"old_counter": 7.0, "near": 1.0, "new_counter": 2.0}


@pytest.mark.parametrize("harm", ["_exit", "kill"])
def test_a_process_that_dies_is_replaced_and_instances_are_made_anew(tools, harm):
    async def run():
        session = await tools.open("test", {"old_counter": {"create_kwargs": {"start": 5}}})
        before = await one(session, "old_counter", n=1)
        crashed = await one(session, "hostile", turn=1, harm=harm)
        after = await one(session, "old_counter", turn=2, n=1)
        return before, crashed, after, await session.finish()

    before, crashed, after, rewards = asyncio.run(run())
    assert (crashed.outcome, crashed.failure) == ("crashed", "crashed")
    assert (before.text, after.text) == ("total 6", "total 6")
    assert before.metrics["pid"] != after.metrics["pid"]
    assert rewards == {"old_counter": 6.0}


def test_a_process_that_holds_the_interpreters_lock_is_killed(tools, monkeypatch):
    monkeypatch.setattr("verl.agents.tools.processes.GRACE_S", 0.5)

    async def run():
        session = await tools.open("test")
        before = await one(session, "old_counter", n=1)
        stuck = await one(session, "hostile", turn=1, harm="stuck")
        await session.finish()
        return before.metrics["pid"], stuck

    pid, stuck = asyncio.run(run())
    assert stuck.outcome == "timeout"
    assert stuck.seconds < 3
    assert not psutil.pid_exists(pid)


def test_hanging_call_does_not_stop_the_process(tools):
    async def run():
        session = await tools.open("test")
        before = await one(session, "old_counter", n=1)
        calls = [
            call("hostile", harm="busy"),
            call("hostile_thread", harm="sleep"),
            call("hostile", harm="flood"),
        ]
        results = await session.call(calls, turn=1)
        after = await one(session, "old_counter", turn=2, n=1)
        await session.finish()
        return before, results, after

    before, results, after = asyncio.run(run())
    assert [result.outcome for result in results[:2]] == ["timeout", "timeout"]
    assert len(results[2].text) < 300
    assert after.text == "total 2"
    assert before.metrics["pid"] == after.metrics["pid"]


def test_a_cancelled_call_is_cancelled_in_its_process(tools):
    async def run():
        session = await tools.open("test")
        waiting = asyncio.ensure_future(one(session, "old_counter", n=1, delay_s=3600))
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        # The next call on the instance does not wait for the one before.
        after = await one(session, "old_counter", turn=1, n=1)
        return after, await session.finish()

    after, rewards = asyncio.run(run())
    assert after.text == "total 1"
    assert rewards == {"old_counter": 1.0}


def test_sessions_work_in_one_event_loop_after_the_other(tools):
    async def run():
        session = await tools.open("test")
        result = await one(session, "old_counter", n=1)
        await session.finish()
        return result.text

    assert [asyncio.run(run()) for _ in range(2)] == ["total 1", "total 1"]


def test_agent_data_that_cannot_be_sent_is_an_error_of_the_call(tools):
    async def run():
        session = await tools.open("test")
        (result,) = await session.call([call("new_counter", n=2)], turn=3, agent_data=lambda: None)
        await session.finish()
        return result

    result = asyncio.run(run())
    assert result.outcome == "error"
    assert "cannot be sent to a process" in result.text


def test_errors_of_the_start_come_from_the_process(tmp_path):
    path = write_config(tmp_path, ("BadStart", {}))
    with pytest.raises(ConfigError, match=r"tools.yaml, tools entry 1 .*no licence"):
        ToolSet.from_config(path)

    file = tmp_path / "dies.py"
    file.write_text("import os\nos._exit(3)\n")
    with pytest.raises(RuntimeError, match="ended with exit code 3"):
        ToolSet.from_config(function_tool_path=str(file))


def test_processes_end_with_their_tool_set(tmp_path):
    path = write_config(tmp_path, ("OldCounter", {}))

    async def run(tools):
        session = await tools.open("test")
        result = await one(session, "old_counter", n=1)
        await session.finish()
        await tools.aclose()
        return result.metrics["pid"]

    pid = asyncio.run(run(ToolSet.from_config(path)))
    assert not psutil.pid_exists(pid)


def test_processes_end_when_the_trainer_is_killed(tmp_path):
    path = write_config(tmp_path, ("OldCounter", {}))
    program = (
        "import asyncio, time\n"
        "from tests.agents.tools.user_tools import one\n"
        "from verl.agents.tools import ToolSet\n"
        "async def run():\n"
        f"    session = await ToolSet.from_config({str(path)!r}).open('test')\n"
        "    result = await one(session, 'old_counter', n=1)\n"
        "    print(result.metrics['pid'], flush=True)\n"
        "    await one(session, 'old_counter', turn=1, n=1, delay_s=60)\n"
        "asyncio.run(run())\n"
    )

    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()

    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid)


def test_processes_are_replaced_after_the_fork_server_died(tools):
    nurseries = [
        child
        for child in psutil.Process().children()
        if "verl.agents.tools.process_main" in " ".join(child.cmdline())
    ]
    assert nurseries
    for nursery in nurseries:  # also those of other tool sets of these tests
        nursery.kill()

    async def run():
        session = await tools.open("test")
        crashed = await one(session, "hostile", harm="_exit")
        after = await one(session, "old_counter", turn=1, n=1)
        await session.finish()
        return crashed, after

    crashed, after = asyncio.run(run())

    assert crashed.outcome == "crashed"
    assert after.text == "total 1"


def test_many_trajectories_share_few_processes(tools):
    async def run():
        sessions = [await tools.open(f"row {row}") for row in range(20)]
        results = await asyncio.gather(*(one(each, "old_counter", n=1) for each in sessions))
        await asyncio.gather(*(each.finish() for each in sessions))
        return {result.metrics["pid"] for result in results}

    assert len(asyncio.run(run())) == 2
