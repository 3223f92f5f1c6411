"""Calls of tools: state, order, limits, and rows with settings of their own."""

import asyncio
import threading
import time

import pytest

from tests.agents.tools.sets_of_tools import counter, run_with
from tests.agents.tools.user_tools import (
    BadStart,
    NewCounter,
    OldCounter,
    call,
    one,
    schema,
    tool_set,
)
from verl.agents.formats.base import ToolCall
from verl.agents.row_options import plain_row_kwargs
from verl.agents.tools import BaseTool, ToolSet
from verl.agents.tools.functions import as_tool
from verl.agents.tools.host import facts_of
from verl.utils.errors import ConfigError, DataError


def test_tool_keeps_its_state_and_gives_its_reward_at_the_end():
    row = {
        "old_counter": {
            "create_kwargs": {"start": 10},
            "execute_kwargs": {"factor": 2},
            "calc_reward_kwargs": {"bonus": 0.5},
            "release_kwargs": None,
        },
        "new_counter": {"create_kwargs": {"start": 100}},
        "unused": None,
    }
    old, new = counter(), NewCounter({}, None)

    async def scenario(tools):
        session = await tools.open("test", row)
        assert set(old.totals.values()) == {10}
        first = await session.call([call("old_counter", n=1)], turn=0, agent_data="data")
        second = await session.call([call("old_counter", n=2)], turn=1, agent_data="data")
        third = await session.call([call("new_counter", n=3)], turn=2, agent_data="data")
        return [*first, *second, *third], await session.finish()

    results, rewards = run_with(tool_set(old, new), scenario)
    texts = [result.text for result in results]

    assert texts == ["total 12", "total 16", "total 103 for data"]
    assert [result.reward for result in results] == [0.5, 0.5, 0.0]
    assert rewards == {"old_counter": 16.5, "new_counter": 103.0}
    assert old.totals == {}


def test_trajectories_do_not_share_instances():
    async def scenario(tools):
        one_session = await tools.open("one")
        other = await tools.open("other")
        texts = []
        for session in (one_session, other, one_session):
            texts.append((await one(session, "old_counter", n=1)).text)
        return texts, await one_session.finish(), await other.finish()

    texts, rewards, other_rewards = run_with(tool_set(counter()), scenario)
    assert texts == ["total 1", "total 1", "total 2"]
    assert (rewards, other_rewards) == ({"old_counter": 2.0}, {"old_counter": 1.0})


class Shared(OldCounter):
    """Keeps the count of a trajectory in an attribute, which all trajectories share."""

    async def create(self, instance_id=None, **kwargs):
        self.count = 0
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        self.count += parameters["n"]
        return f"total {self.count}"

    async def calc_reward(self, instance_id, **kwargs):
        return 0.0

    async def release(self, instance_id, **kwargs):
        pass


class LateClient(OldCounter):
    """Makes the client of all trajectories in its first call, and keeps instances as it should."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.client = None

    async def execute(self, instance_id, parameters, **kwargs):
        self.client = self.client or object()
        self.cache = getattr(self, "cache", {})
        return await super().execute(instance_id, parameters, **kwargs)


@pytest.mark.parametrize(("tool_class", "warnings"), [(Shared, 1), (LateClient, 0)])
def test_state_that_trajectories_share_is_a_warning(tool_class, warnings, caplog):
    async def scenario(tools):
        for name in ("first", "second"):
            session = await tools.open(name)
            for _ in range(2):
                await one(session, "old_counter", n=1)
            await session.finish()

    with caplog.at_level("WARNING", logger="verl"):
        run_with(tool_set(tool_class({}, None)), scenario)
    assert caplog.text.count("The tool 'old_counter' set self.count anew in a call.") == warnings
    assert caplog.text.count("self.count[instance_id] = ...") == warnings
    assert caplog.text.count("anew") == warnings


def test_an_empty_answer_is_a_warning(caplog):
    def forgets(n: int):
        """Forget the return."""

    async def scenario(tools):
        session = await tools.open("row 7")
        for _ in range(2):
            assert (await one(session, "forgets", n=1)).text == ""
        await session.finish()

    with caplog.at_level("WARNING", logger="verl"):
        run_with(tool_set(forgets), scenario)
    assert caplog.text.count("'forgets' gave an empty answer in row 7") == 1
    assert "is a return statement missing?" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "outcome", "text"),
    [
        ({}, "malformed", "do not fit: n: missing (KeyError: 'n')"),
        ({"n": "two"}, "malformed", "do not fit: n: expected integer, got string (TypeError"),
        ({"n": 1, "delay_s": "x"}, "error", "Error: TypeError"),
        ({"n": 2.0}, "ok", "total 2.0"),
    ],
)
def test_a_class_that_fails_on_arguments_of_another_type_is_not_to_blame(arguments, outcome, text):
    async def scenario(tools):
        session = await tools.open("test")
        result = await one(session, "old_counter", **arguments)
        await session.finish()
        return result

    result = run_with(tool_set(counter(), policy="drop"), scenario)
    assert text in result.text
    assert result.outcome == ("dropped" if outcome == "error" else outcome)


def test_results_have_the_order_of_the_calls():
    async def slow(delay_s: float) -> str:
        """Wait."""
        await asyncio.sleep(delay_s)
        return f"waited {delay_s}"

    async def scenario(tools):
        session = await tools.open("test")
        began = time.monotonic()
        calls = [call("slow", delay_s=delay) for delay in (0.4, 0.2, 0.0)]
        results = await session.call(calls, turn=0)
        took = time.monotonic() - began
        await session.finish()
        return [result.text for result in results], took

    texts, took = run_with(tool_set(slow, max_parallel_calls=3), scenario)
    assert texts == ["waited 0.4", "waited 0.2", "waited 0.0"]
    assert took < 0.6  # sequential calls: 0.6


@pytest.mark.parametrize(("parallel", "texts"), [(None, ["total 1", "total 3"]), (True, None)])
def test_calls_on_one_instance_are_sequential_unless_parallel(parallel, texts):
    async def scenario(tools):
        session = await tools.open("test")
        calls = [call("old_counter", n=1, delay_s=0.2), call("old_counter", n=2, delay_s=0.0)]
        results = await session.call(calls, turn=0)
        await session.finish()
        return [result.text for result in results]

    tools = tool_set(counter(parallel=parallel) if parallel else counter(), max_parallel_calls=2)
    answers = run_with(tools, scenario)
    assert answers == (texts or ["total 1", "total 2"])


def test_every_call_is_answered():
    broken = ToolCall(name="old_counter", arguments=None, error="expected JSON, got {n: 1", raw="{")
    calls = [
        broken,
        call("oldcounter", n=1),
        call("old_counter", n=1),
        call("old_counter", n=1),
        call("nothing"),
    ]

    async def scenario(tools):
        session = await tools.open("test")
        results = await session.call(calls, turn=0)
        await session.finish()
        return results, tools.counts(reset=True), tools.counts()

    tools = tool_set(counter(), max_parallel_calls=3, policy="drop")
    results, counts, after = run_with(tools, scenario)
    outcomes = [result.outcome for result in results]
    assert outcomes == ["malformed", "unknown", "ok", "over_cap", "over_cap"]
    assert results[0].text == "Error: expected JSON, got {n: 1"
    assert results[1].text == "Error: there is no tool 'oldcounter'. Tools: old_counter."
    assert "at most 3 tool calls are allowed in one turn" in results[3].text
    assert {result.consequence for result in results} == {"continue"}

    assert counts["tools/old_counter/malformed"] == 1
    assert counts["tools/old_counter/ok"] == 1
    assert counts["tools/old_counter/over_cap"] == 1
    assert counts["tools/unknown_tool/unknown"] == 1
    assert counts["tools/unknown_tool/over_cap"] == 1
    assert counts["tools/old_counter/seconds/max"] >= counts["tools/old_counter/seconds/mean"] > 0
    assert after == {}


def test_a_row_may_offer_some_of_the_tools():
    async def scenario(tools):
        session = await tools.open("test", names=["new_counter"])
        result = await one(session, "old_counter", n=1)
        await session.finish()
        return result, tools.schemas(["new_counter"]), tools.schemas()

    result, some, every = run_with(tool_set(counter(), NewCounter({}, None)), scenario)
    assert result.outcome == "unknown"
    assert result.text.endswith("Tools: new_counter.")
    assert [each["function"]["name"] for each in some] == ["new_counter"]
    assert [each["function"]["name"] for each in every] == ["old_counter", "new_counter"]


def test_long_answers_are_cut_and_counted_in_characters():
    def long() -> str:
        """Return a lot."""
        return "ä" * 1000

    async def scenario(tools):
        session = await tools.open("test")
        result = await one(session, "long")
        await session.finish()
        return result.text

    tools = tool_set(long, max_tool_response_length=10, tool_response_truncate_side="left")
    assert run_with(tools, scenario) == "ä" * 10 + "...(truncated)"


def test_the_callers_loop_may_be_busy_while_tools_run():
    async def scenario(tools):
        session = await tools.open("test")
        waiting = asyncio.ensure_future(one(session, "old_counter", n=1, delay_s=0.2))
        await asyncio.sleep(0.05)
        time.sleep(0.5)  # a step of the engine
        began = time.monotonic()
        await waiting
        await session.finish()
        return time.monotonic() - began

    assert run_with(tool_set(counter()), scenario) < 0.15


def test_rows_with_unknown_tools_and_wrong_settings_are_refused():
    async def scenario(tools):
        with pytest.raises(DataError, match="names the tool 'counter'.*old_counter"):
            await tools.open("test", {"counter": {"create_kwargs": {}}})
        with pytest.raises(ConfigError, match="No tool is named 'x'"):
            await tools.open("test", names=["x"])
        with pytest.raises(ConfigError, match="No tool is named 'y'"):
            tools.schemas(["y"])

    run_with(tool_set(counter()), scenario)
    with pytest.raises(ConfigError, match="policy.*text, mask, drop, got 'ignore'"):
        tool_set(policy="ignore")
    with pytest.raises(ConfigError, match="max_parallel_calls must be above 0"):
        tool_set(max_parallel_calls=0)
    with pytest.raises(ConfigError, match="isolation=process"):
        tool_set(counter(isolation="process"))
    with pytest.raises(ConfigError, match="a BaseTool or a function, got int"):
        tool_set(3)


def test_a_class_without_a_schema_is_refused():
    with pytest.raises(ConfigError, match="needs a tool_schema"):
        BaseTool({}, None)


def test_values_of_none_in_a_row_are_absent():
    row = {"a": {"create_kwargs": None, "execute_kwargs": {"x": None}}, "b": None}
    assert plain_row_kwargs(row) == {"a": {"execute_kwargs": {"x": None}}}
    assert plain_row_kwargs(None) == {}


def test_a_tool_that_cannot_be_made_ends_the_start_without_threads(tmp_path):
    path = tmp_path / "tools.yaml"
    name = f"{BadStart.__module__}.BadStart"
    path.write_text(f"tools: [{{class_name: {name}, config: {{isolation: thread}}}}]")
    before = threading.active_count()
    with pytest.raises(ConfigError, match="no licence"):
        ToolSet.from_config(path)
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before, "no thread more"


class Passes(BaseTool):
    """Hands its keywords to a method that reads the state of the episode."""

    async def execute(self, instance_id, parameters, **kwargs):
        return await self.answer(**kwargs)

    async def answer(self, agent_data=None, **others):
        return f"{agent_data} {others}"


class PassesUp(Passes):
    async def execute(self, instance_id, parameters, **kwargs):
        return await super().execute(instance_id, parameters, **kwargs)


class Asks(BaseTool):
    """Decides by itself whether it gets the state of the episode."""

    def takes_agent_data(self, *, is_copied):
        return is_copied

    async def execute(self, instance_id, parameters, **kwargs):
        return str(kwargs)


def without_data(n: int) -> str:
    """Take no state."""
    return str(n)


def with_data(n: int, agent_data=None) -> str:
    """Take the state."""
    return f"{n} {agent_data}"


def test_a_tool_says_whether_it_gets_the_state_of_the_episode():
    """In a helper process each of these has the whole trajectory sent with every call."""
    expected = [
        (Passes({}, schema("passes")), True, True),
        (PassesUp({}, schema("passes_up")), True, True),
        (Asks({}, schema("asks")), False, True),
        (counter(), True, False),
        (as_tool(with_data), True, True),
        (as_tool(without_data), False, False),
    ]
    for tool, here, in_a_process in expected:
        assert facts_of(tool, (0, 0), in_process=False).takes_agent_data == here, tool.name
        assert facts_of(tool, (0, 0), in_process=True).takes_agent_data == in_a_process, tool.name
