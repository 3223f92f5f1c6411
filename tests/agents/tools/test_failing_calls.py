"""Calls of tools that fail, hang or are cancelled, and the release of their tools."""

import asyncio
import gc
import threading
import time

import pytest

from tests.agents.tools.sets_of_tools import counter, run_with
from tests.agents.tools.user_tools import (
    Hostile,
    HostileInThread,
    OldCounter,
    one,
    schema,
    tool_set,
)
from verl.agents.tools import BaseTool
from verl.utils.errors import RolloutError
from verl.utils.threads import LoopThread


@pytest.mark.parametrize(
    ("policy", "outcome", "consequence"),
    [("text", "error", "continue"), ("mask", "error", "mask"), ("drop", "dropped", "drop")],
)
def test_failure_follows_the_policy(policy, outcome, consequence):
    async def scenario(tools):
        session = await tools.open("test")
        bad = await one(session, "hostile", harm="raise")
        good = await one(session, "hostile", turn=1, harm="none")
        await session.finish()
        return bad, good, session.consequence, tools.counts()

    tools = tool_set(Hostile({}, None), policy=policy)
    bad, good, of_session, counts = run_with(tools, scenario)
    assert bad.text == "Error: KeyError: 'no such thing'"
    assert (bad.outcome, bad.failure, bad.consequence) == (outcome, "error", consequence)
    assert (good.outcome, good.failure, good.consequence) == ("ok", None, "continue")
    assert of_session == consequence
    assert counts["tools/hostile/error"] == 1


def test_a_tool_may_ask_for_retries():
    attempts = []

    class Flaky(BaseTool):
        async def execute(self, instance_id, parameters, **kwargs):
            attempts.append(time.monotonic())
            if len(attempts) < 3:
                raise ConnectionError("down")
            return "up"

    async def scenario(tools):
        session = await tools.open("test")
        result = await one(session, "flaky")
        await session.finish()
        return result, tools.counts()

    flaky = Flaky({"retries": 2, "retry_delay_s": 0.1}, schema("flaky"))
    result, counts = run_with(tool_set(flaky), scenario)

    assert (result.text, result.outcome) == ("up", "ok")
    assert counts["tools/flaky/retried"] == 2
    assert attempts[1] - attempts[0] >= 0.1
    assert attempts[2] - attempts[1] >= 0.2


def test_retries_end_with_the_deadline():
    async def scenario(tools):
        session = await tools.open("test")
        result = await one(session, "hostile", harm="raise")
        await session.finish()
        return result

    hostile = Hostile({"retries": 1000, "retry_delay_s": 0.05, "timeout_s": 0.4}, None)
    result = run_with(tool_set(hostile), scenario)
    assert result.outcome == "error"
    assert result.seconds < 0.5


def harmed_and_fine(tool, harm):
    """Return the results of a harmful call and of the one after it."""

    async def scenario(tools):
        session = await tools.open("test")
        result = await one(session, "hostile", harm=harm)
        after = await one(session, "hostile", turn=1, harm="none")
        await session.finish()
        return result, after

    return run_with(tool_set(tool, timeout_s=0.3), scenario)


@pytest.mark.parametrize("tool_class", [Hostile, HostileInThread])
@pytest.mark.parametrize("harm", ["sleep", "busy"])
def test_a_call_that_hangs_ends_at_its_deadline(tool_class, harm):
    result, after = harmed_and_fine(tool_class({}, None), harm)
    assert result.outcome == "timeout"
    assert result.text == "Error: the tool 'hostile' did not answer within 0.3 s"
    assert 0.3 <= result.seconds < 1.5
    assert after.text == "fine"


def test_blocking_coroutine_does_not_delay_other_trajectories():
    async def scenario(tools):
        session = await tools.open("test")
        blocking = asyncio.ensure_future(one(session, "hostile", harm="block"))
        await asyncio.sleep(1.8)  # until its loop is found to be blocked
        began = time.monotonic()
        other = await tools.open("other")
        result = await one(other, "hostile", harm="none")
        took = time.monotonic() - began
        late = await blocking
        await session.finish()
        await other.finish()
        return result, took, late

    result, took, late = run_with(tool_set(Hostile({}, None), timeout_s=2.5), scenario)
    assert result.outcome == "ok"
    assert took < 0.9
    assert late.outcome == "timeout"


@pytest.mark.parametrize("harm", ["exit", "deaf"])
def test_unusual_coroutines_are_ended(harm):
    result, after = harmed_and_fine(Hostile({}, None), harm)
    assert result.outcome == {"exit": "error", "deaf": "timeout"}[harm]
    assert after.text == "fine"


def test_a_coroutine_that_ignores_its_cancellation_ends_with_its_loop(caplog):
    """Its resources are released, and Python prints nothing about a destroyed task."""
    ended = threading.Event()

    async def ignore_cancellation():
        try:
            await Hostile({}, None).execute("", {"harm": "deaf"})
        finally:
            ended.set()

    loop = LoopThread("deaf")
    loop.submit(ignore_cancellation())
    assert asyncio.run(loop.answers(10.0))  # so that the coroutine has begun

    loop.close()
    loop.thread.join(10.0)
    gc.collect()

    assert ended.is_set()
    assert not loop.thread.is_alive()
    assert caplog.messages == []


def test_coroutines_that_block_every_loop_end_in_an_answer(monkeypatch):
    monkeypatch.setattr("verl.agents.tools.host.MAX_LOOPS", 2)

    async def scenario(tools):
        session = await tools.open("test")
        results = [
            await one(session, "hostile", turn=turn, harm=harm)
            for turn, harm in enumerate(["block", "block", "none"])
        ]
        await session.finish()
        return results

    results = run_with(tool_set(Hostile({}, None), timeout_s=0.2), scenario)

    assert [result.outcome for result in results] == ["timeout", "timeout", "crashed"]
    assert "isolation: process" in results[2].text
    assert results[2].seconds < 0.2


def test_a_cancelled_trajectory_releases_its_tools():
    old = counter()

    async def scenario(tools):
        session = await tools.open("test")
        assert (await one(session, "old_counter", n=1)).text == "total 1"

        async def episode():
            try:
                await one(session, "old_counter", turn=1, n=1, delay_s=3600)
            finally:
                await session.finish()

        task = asyncio.ensure_future(episode())
        await asyncio.sleep(0.1)
        assert old.totals

        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return tools.counts()

    counts = run_with(tool_set(old), scenario)

    assert old.totals == {}
    assert counts["tools/old_counter/cancelled"] == 1


def test_close_releases_open_sessions():
    old = counter()
    tools = tool_set(old)

    async def leave_open():
        session = await tools.open("test")
        await one(session, "old_counter", n=1)

    asyncio.run(leave_open())
    assert old.totals
    tools.close()
    assert old.totals == {}
    with pytest.raises(RolloutError, match="closed"):
        asyncio.run(leave_open())


class Announced(OldCounter):
    """Sets `is_asked` when a call has come that takes long."""

    is_asked = threading.Event()

    async def execute(self, instance_id, parameters, **kwargs):
        if "delay_s" in parameters:
            self.is_asked.set()
        return await super().execute(instance_id, parameters, **kwargs)


def test_tools_are_released_when_the_whole_loop_is_cancelled():
    old = Announced({}, None)
    tools = tool_set(old)

    async def main():
        session = await tools.open("test")
        try:
            await one(session, "old_counter", n=1)
            await one(session, "old_counter", turn=1, n=1, delay_s=3600)
        finally:
            await session.finish()

    async def interrupted():
        task = asyncio.ensure_future(main())
        assert await asyncio.to_thread(old.is_asked.wait, 60)
        assert old.totals
        raise KeyboardInterrupt(task)  # asyncio.run cancels the other tasks

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())

    tools.close()
    assert old.totals == {}


def test_finish_can_be_called_twice():
    async def scenario(tools):
        session = await tools.open("test")
        await one(session, "old_counter", n=4)
        return await session.finish(), await session.finish()

    first, second = run_with(tool_set(counter()), scenario)
    assert first == second == {"old_counter": 4.0}


class Faulty(OldCounter):
    """Fails in the method that its config names."""

    async def create(self, instance_id=None, **kwargs):
        self.check("create")
        return await super().create(instance_id)

    async def calc_reward(self, instance_id, bonus=0.0, **kwargs):
        self.check("calc_reward")
        return await super().calc_reward(instance_id)

    async def release(self, instance_id, **kwargs):
        await super().release(instance_id)
        self.check("release")

    def check(self, method):
        if self.config["fails"] == method:
            raise OSError(method)


@pytest.mark.parametrize(
    ("method", "outcome", "rewards"),
    [
        ("create", "error", {}),
        ("calc_reward", "ok", {}),
        ("release", "ok", {"old_counter": 1.0}),
    ],
)
def test_failures_around_a_call_are_counted_and_release_is_called(method, outcome, rewards):
    faulty = Faulty({"fails": method}, None)

    async def scenario(tools):
        session = await tools.open("test", {"old_counter": {"create_kwargs": {"a": 1}}})
        result = await one(session, "old_counter", n=1)
        return result, await session.finish(), tools.counts(), session.consequence

    result, got, counts, consequence = run_with(tool_set(faulty, policy="mask"), scenario)
    assert result.outcome == outcome
    assert got == rewards
    assert counts[f"tools/old_counter/{method}_error"] == 1
    assert consequence == ("continue" if method == "release" else "mask")
    assert faulty.totals == {}
