import asyncio
import dataclasses
import threading

import numpy as np
import pytest
from PIL import Image

from tests.agents.tools.user_tools import Hostile, OldCounter, call, schema, tool_set
from verl.agents.formats.base import ToolCall
from verl.agents.tools import BaseTool, ToolResponse, ToolSet
from verl.agents.tools.agent_data import AgentData
from verl.agents.tools.replay import CallKey, Recorder, Recording
from verl.agents.tools.results import ToolResult
from verl.utils.errors import ConfigError, DataError

ROW = {"old_counter": {"create_kwargs": {"start": 3}}}
TURNS = [
    [call("old_counter", n=1), call("hostile", harm="raise"), call("nothing", a="ä\ud800")],
    [ToolCall(name="old_counter", arguments=None, error="no JSON", raw="{n")],
    [call("see", n=2)],
]


def see(n: int) -> ToolResponse:
    """See."""
    pixels = np.arange(12 * n, dtype=np.uint8).reshape(2, 2 * n, 3)
    return ToolResponse(text="t", image=[Image.fromarray(pixels), "http://host/i.png", b"\x00\xff"])


async def trajectory(tools, turns=TURNS, row=0):
    session = await tools.open(f"row {row}", ROW, step=7, row=row)
    try:
        results = [await session.call(calls, turn=turn) for turn, calls in enumerate(turns)]
    finally:
        rewards = await session.finish()
    return results, rewards, session.consequence


@pytest.fixture
def recorded(tmp_path):
    """Return the path of a record, and the two trajectories in it."""
    path = tmp_path / "calls.jsonl"
    tools = tool_set(
        OldCounter({}, None),
        Hostile({}, None),
        see,
        max_parallel_calls=2,
        policy="mask",
        record_path=path,
    )

    async def run():
        made = await asyncio.gather(*(trajectory(tools, row=row) for row in range(2)))
        await tools.aclose()
        return made, tools.schemas(), tools.counts()

    return path, *asyncio.run(run())


def plain(trajectory):
    """Return a trajectory as values that can be compared bit for bit."""
    results, rewards, consequence = trajectory
    fields = []
    for turn in results:
        for result in turn:
            values = dict(vars(result))
            values["images"] = [
                (image.mode, image.size, image.tobytes()) if hasattr(image, "mode") else image
                for image in result.images
            ]
            fields.append(values)
    return fields, rewards, consequence


def test_a_replay_gives_the_same_without_the_tools(recorded):
    path, made, schemas, counts = recorded
    tools = ToolSet.from_config(replay_path=path)

    async def run():
        return [await trajectory(tools, row=row) for row in (1, 0)]

    again = asyncio.run(run())
    assert plain(again[1]) == plain(made[0])
    assert plain(again[0]) == plain(made[1])
    assert again[0][2] == "mask"
    assert tools.schemas() == schemas
    assert tools.counts() == pytest.approx(counts)


class Notes(BaseTool):
    """Keeps what it was asked in the fields of the episode."""

    def get_openai_tool_schema(self):
        return schema("notes", n="integer")

    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        agent_data.extra_fields.setdefault("asked", []).append(parameters["n"])
        agent_data.extra_fields["lock"] = threading.Lock()
        return "noted"


def test_a_replay_gives_the_fields_that_tools_set(tmp_path):
    path = tmp_path / "calls.jsonl"

    async def asked(tools):
        seen = []
        data = AgentData(request_id="7-0")
        session = await tools.open("row 0", step=7, row=0)
        for turn, numbers in enumerate([(1, 2), (3,)]):
            calls = [call("notes", n=n) for n in numbers]
            await session.call(calls, turn=turn, agent_data=data)
            seen.append(list(data.extra_fields["asked"]))
        await session.finish()
        await tools.aclose()
        return seen, sorted(data.extra_fields)

    notes = Notes({"isolation": "thread", "parallel": False}, None)
    recording = tool_set(notes, max_parallel_calls=2, record_path=path)
    assert asyncio.run(asked(recording)) == ([[1, 2], [1, 2, 3]], ["asked", "lock"])
    replaying = ToolSet.from_config(replay_path=path)
    assert asyncio.run(asked(replaying)) == ([[1, 2], [1, 2, 3]], ["asked"])


def test_another_or_a_missing_call_is_named(recorded):
    path = recorded[0]
    tools = ToolSet.from_config(replay_path=path)
    other = [[call("old_counter", n=2), *TURNS[0][1:]]]
    with pytest.raises(
        DataError,
        match=r'step 7, row 1, turn 0, call 0: the recorded call is old_counter\({"n": 1}\), '
        r'this run makes old_counter\({"n": 2}\)',
    ):
        asyncio.run(trajectory(tools, other, row=1))
    more = [*TURNS, [call("see", n=1)]]
    with pytest.raises(DataError, match="no call for step 7, row 0, turn 3, call 0: see"):
        asyncio.run(trajectory(tools, more))
    with pytest.raises(DataError, match="no end of the trajectory of step 7, row 5"):
        asyncio.run(trajectory(tools, [], row=5))


def test_a_run_that_died_leaves_a_record_that_can_be_continued(recorded):
    path = recorded[0]
    whole = path.read_bytes()
    cut = whole[: whole.rfind(b"\n", 0, -1) - 10]
    path.write_bytes(cut)
    Recording(path)  # the unfinished line is left out

    result = ToolResult("later", "ok")
    recorder = Recorder(path, [])
    recorder.add_call(CallKey(7, 0, 0, 0), TURNS[0][0], result)
    recorder.close()
    assert Recording(path).result(CallKey(7, 0, 0, 0), TURNS[0][0]) == result
    kept = cut[: cut.rfind(b"\n") + 1]
    assert path.read_bytes().startswith(kept)


def test_numbers_survive_bit_for_bit(tmp_path):
    result = ToolResult("a", "ok", reward=0.1 + 0.2, metrics={"x": 1e-300, "n": 2**70})
    recorder = Recorder(tmp_path / "r.jsonl", [])
    recorder.add_call(CallKey(0, 0, 0, 0), TURNS[0][0], result)
    recorder.close()
    assert Recording(tmp_path / "r.jsonl").result(CallKey(0, 0, 0, 0), TURNS[0][0]) == result


def test_unserializable_values_are_rejected(tmp_path):
    recorder = Recorder(tmp_path / "r.jsonl", [])
    result = dataclasses.replace(ToolResult("a", "ok"), images=[object()])
    with pytest.raises(DataError, match="step 1, row 2, turn 3, call 4 holds a object"):
        recorder.add_call(CallKey(1, 2, 3, 4), TURNS[0][0], result)
    recorder.close()


def test_wrong_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        ToolSet.from_config(replay_path=tmp_path / "none.jsonl")
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"kind": "call"}\n')
    with pytest.raises(DataError, match="line 1"):
        ToolSet.from_config(replay_path=path)
    path.write_text("")
    with pytest.raises(DataError, match="holds no record"):
        ToolSet.from_config(replay_path=path)
    with pytest.raises(DataError, match="cannot be written"):
        tool_set(record_path=tmp_path)
    with pytest.raises(ConfigError, match="recorded or replayed"):
        tool_set(record_path=path, replay_path=path)
