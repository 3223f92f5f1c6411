"""Episodes that fail: which of them stop a run, which are dropped, and what the error says."""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.agents.scripted import (
    PARAMS,
    ScriptedEngine,
    chat_tokenizer,
    episode,
    play,
    rollout_config,
)
from tests.agents.tool_files import TOOLS
from verl.agents import AgentRunner, EngineClient, EngineSteps
from verl.agents.loops import Episode
from verl.agents.loops.environment import seed_of
from verl.rollout.trajectory import DROPPED_BECAUSE
from verl.utils.errors import DataError, RolloutError

LOOPS = '''
import asyncio

from verl.agents import AgentLoopBase, AgentLoopOutput


class Late(AgentLoopBase):
    """Has a deadline of its own, as a client of a sandbox has."""

    async def run(self, messages, sampling_params):
        raise asyncio.TimeoutError("the sandbox did not answer")


class Endless(AgentLoopBase):
    """Draws until no token fits."""

    async def run(self, messages, sampling_params):
        ids = [5] * 100
        while True:
            ids += [5] * 1000
            await self.server_manager.generate(
                "id", prompt_ids=ids, sampling_params=sampling_params
            )


class Long(AgentLoopBase):
    """Adds a document to the prompt."""

    async def run(self, messages, sampling_params):
        ids = self.tokenizer.encode("a page " * 50, add_special_tokens=False)
        drawn = await self.server_manager.generate(
            "id", prompt_ids=ids, sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=ids, response_ids=drawn, response_mask=[1] * len(drawn)
        )
'''
WORLD = """
import time

from verl.agents.environments import ActionError, GymEnvironment, Observation


class World:
    def __init__(self, how="raise"):
        self.how = how

    def reset(self):
        if self.how == "no beginning":
            raise ValueError("there is no board")
        if self.how == "no turn":
            return Observation([], done=True)
        return Observation([{"role": "user", "content": "Go."}])

    def step(self, action):
        if self.how == "raise":
            raise ValueError("the board is broken")
        if self.how == "refuse":
            return GymEnvironment(self, as_action=self.refuse).step(action)
        if self.how == "answer":
            return Observation([{"role": "user", "content": "Again."}])
        time.sleep(10)

    def refuse(self, text):
        raise ActionError("Name a field.")
"""
USER = """
import asyncio

from verl.agents.interactions import BaseInteraction


class User(BaseInteraction):
    async def start_interaction(self, instance_id=None, **kwargs):
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        raise KeyError("no such answer")


class Hangs(User):
    async def start_interaction(self, instance_id=None, **kwargs):
        await asyncio.sleep(10)
"""
NOTES = """
from verl.tools.base_tool import BaseTool


class Note(BaseTool):
    async def create(self, instance_id=None, log="", **kwargs):
        self.log = log
        self.write("create")
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        return "noted"

    async def release(self, instance_id, **kwargs):
        self.write("release")

    def write(self, line):
        with open(self.log, "a") as file:
            file.write(line + "\\n")
"""
NOTES_FILE = """
tools:
  - class_name: {path}/notes.py:Note
    config: {{isolation: thread}}
    tool_schema:
      type: function
      function:
        name: note
        description: Take a note.
        parameters: {{type: object, properties: {{}}, required: []}}
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    texts = {
        "loops.py": LOOPS,
        "world.py": WORLD,
        "user.py": USER,
        "tools.py": TOOLS,
        "notes.py": NOTES,
        "notes.yaml": NOTES_FILE.format(path=tmp_path),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    (tmp_path / "loops.yaml").write_text(
        f"- {{name: late, _target_: {tmp_path}/loops.py:Late}}\n"
        f"- {{name: endless, _target_: {tmp_path}/loops.py:Endless}}\n"
        f"- {{name: long, _target_: {tmp_path}/loops.py:Long}}\n"
    )
    (tmp_path / "users.yaml").write_text(
        f"interaction:\n  - {{name: user, class_name: {tmp_path}/user.py:User, config: {{}}}}\n"
        f"  - {{name: hangs, class_name: {tmp_path}/user.py:Hangs, config: {{}}}}\n"
    )
    return tmp_path


def played(files: Path, fields: dict | None = None, **settings):
    tokenizer = chat_tokenizer()
    rows = [episode(tokenizer, **(fields or {}))]
    trajectories, metrics, engine = play(
        rollout_config(**settings), tokenizer, lambda row, turn, prompt: "Go on.", rows
    )
    return trajectories, metrics, engine


def loop_settings(files: Path, name: str, **settings) -> dict:
    own = {
        "agent__agent_loop_config_path": str(files / "loops.yaml"),
        "agent__default_agent_loop": name,
    }
    return own | settings


@pytest.mark.parametrize("limit_s", [None, 60.0])
def test_a_deadline_of_the_loop_is_an_error_of_the_loop(files: Path, limit_s: float | None):
    settings = loop_settings(files, "late", agent__episode_timeout_s=limit_s)
    with pytest.raises(RolloutError, match=r"raised TimeoutError .*: the sandbox did not answer"):
        played(files, **settings)
    (trajectory,), metrics, _ = played(files, **settings, agent__on_error="drop")
    cause = trajectory.extra[DROPPED_BECAUSE]
    assert cause.startswith("TimeoutError (")
    assert cause.endswith("): the sandbox did not answer")
    assert metrics["agent_loop/dropped"] == 1


def test_a_prompt_that_a_loop_makes_too_long_names_the_limit(files: Path):
    settings = loop_settings(files, "long", prompt_length=60)
    with pytest.raises(DataError, match=r"sample 0 has \d+ tokens.*max_prompt_length allows 60"):
        played(files, **settings)
    (trajectory,), _, _ = played(files, **settings, agent__on_error="drop")
    assert trajectory.is_dropped


def test_a_context_that_outgrows_the_model_can_be_dropped(files: Path):
    settings = loop_settings(files, "endless")
    with pytest.raises(DataError, match="Turn 3 of sample 0 has a prompt of 4100 tokens"):
        played(files, **settings)
    (trajectory,), _, engine = played(files, **settings, agent__on_error="drop")
    assert trajectory.is_dropped
    assert len(engine.prompts) == 3


def test_a_prompt_too_long_with_its_tools_draws_nothing(files: Path):
    settings = {"multi_turn__function_tool_path": str(files / "tools.py"), "prompt_length": 40}
    with pytest.raises(DataError, match="max_prompt_length allows 40"):
        played(files, **settings)
    (trajectory,), _, engine = played(files, **settings, agent__on_error="drop")
    assert trajectory.is_dropped
    assert engine.prompts == []


def world(files: Path, how: str) -> dict:
    return {
        "agent__environment__name": f"{files}/world.py:World",
        "agent__environment__kwargs": {"how": how},
        "agent__environment__timeout_s": 60.0,
    }


def test_an_environment_that_raises_stops_the_run_or_is_dropped(files: Path):
    with pytest.raises(RolloutError, match=r"the board is broken\. Fix it, or .*on_error=drop"):
        played(files, **world(files, "raise"))
    (trajectory,), metrics, _ = played(files, **world(files, "raise"), agent__on_error="drop")
    assert trajectory.is_dropped
    assert "the board is broken" in trajectory.extra[DROPPED_BECAUSE]
    assert metrics["agent_loop/dropped"] == 1


@pytest.mark.parametrize(
    ("how", "failure"),
    [
        ("no beginning", r"World\.reset raised ValueError \(.*world\.py:\d+\): there is no board"),
        ("no turn", "the environment ended it before the first turn"),
    ],
)
def test_an_environment_that_fails_before_the_first_turn_is_named(files: Path, how, failure):
    (trajectory,), _, _ = played(files, **world(files, how), agent__on_error="drop")
    assert trajectory.is_dropped
    assert re.fullmatch(failure, trajectory.extra[DROPPED_BECAUSE])


def test_turns_without_an_action_are_counted(files: Path):
    settings = world(files, "refuse")
    (trajectory,), metrics, _ = played(files, **settings, multi_turn__max_user_turns=2)
    assert not trajectory.is_dropped
    assert metrics["agent_loop/unreadable_actions"] == 3


def test_an_environment_that_is_late_costs_its_episode(files: Path):
    settings = {**world(files, "sleep"), "agent__environment__timeout_s": 0.1}
    (trajectory,), _, _ = played(files, **settings)
    assert trajectory.is_dropped


def test_answers_of_an_environment_are_bounded_as_those_of_tools(files: Path):
    settings = world(files, "answer")
    (trajectory,), metrics, _ = played(files, **settings, multi_turn__max_user_turns=2)
    drawn = [segment for segment in trajectory.segments if segment.is_model]
    assert len(drawn) == 3
    assert metrics["agent_loop/ended_by/turns"] == 1


def test_an_episode_that_ends_before_its_first_turn_releases_its_tools(files: Path):
    """A simulated user that hangs at the start is one way to get there."""
    fields = {
        "extra_info": {
            "tools_kwargs": {"note": {"create_kwargs": {"log": str(files / "log")}}},
            "interaction_kwargs": {"name": "hangs"},
        }
    }
    settings = {
        "multi_turn__tool_config_path": str(files / "notes.yaml"),
        "multi_turn__interaction_config_path": str(files / "users.yaml"),
        "agent__episode_timeout_s": 1.0,
    }
    tokenizer = chat_tokenizer()
    runner = AgentRunner(rollout_config(**settings), tokenizer)
    engine: Any = ScriptedEngine(tokenizer, lambda row, turn, prompt: "Go on.")
    client = EngineClient(EngineSteps(engine, PARAMS, seed=0, step=1), max_model_len=4000)
    try:
        (trajectory,) = runner.play([episode(tokenizer, row=0, **fields)], client)
        noted = (files / "log").read_text().split()
    finally:
        runner.close()
    assert trajectory.is_dropped
    assert noted == ["create", "release"]


def test_a_simulated_user_that_raises_stops_the_run_or_is_dropped(files: Path):
    fields = {"extra_info": {"interaction_kwargs": {"name": "user"}}}
    settings = {"multi_turn__interaction_config_path": str(files / "users.yaml")}
    with pytest.raises(RolloutError, match=r"no such answer'?\. Fix it, or .*on_error=drop"):
        played(files, fields, **settings)
    (trajectory,), metrics, _ = played(files, fields, **settings, agent__on_error="drop")
    assert trajectory.is_dropped
    assert trajectory.turn_rewards == {}
    assert metrics["agent_loop/ended_by/dropped"] == 1


def test_a_validation_row_has_one_world_in_every_validation():
    def seed(step: int, record_step: int, row: int = 3) -> int:
        fields = {"prompt_row": row}
        return seed_of(
            Episode(
                row=row,
                messages=[],
                prompt_ids=[],
                fields=fields,
                step=step,
                record_step=record_step,
            )
        )

    assert seed(0, -1) == seed(0, -5_000_001)
    assert len({seed(0, -1), seed(1, -2), seed(0, -1, row=4), seed(1, 1), seed(2, 2)}) == 5
