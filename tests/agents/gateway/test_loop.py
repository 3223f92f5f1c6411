"""Agents from users' files and programs, with a session for each episode."""

import asyncio
import math
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.agents.gateway.stand_ins import client_of, wording_of
from tests.rollout.engines import make_engine
from tests.tiny_models import tiny_model
from verl.agents.gateway.agents import AgentError, load_agent, read_reward
from verl.agents.gateway.loop import gateway_loop
from verl.agents.loops import Episode
from verl.config.gateway import GatewayConfig
from verl.rollout.trajectory import Trajectory
from verl.utils.errors import ConfigError

AGENTS = '''
"""Agents as users write them."""
import asyncio
import time

import openai

def ask(client, text):
    return client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": text}], max_tokens=6
    )

async def run(base_url, api_key, row):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        answer = await ask(client, row["question"])
    return float(answer.usage.completion_tokens)

def plain(base_url, api_key, row):
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        ask(client, row["messages"][0]["content"])
    return {"reward": 0.25, "note": row["question"], "num_turns": 77}

async def blocking(base_url, api_key, row):
    with openai.OpenAI(base_url=base_url, api_key=api_key, timeout=20) as client:
        ask(client, "a coroutine that blocks its event loop")

async def failing(base_url, api_key, row):
    score = await run(base_url, api_key, row)
    if row["question"] == "q1":
        raise KeyError("no such tool")
    return score

async def wrong(base_url, api_key, row):
    await run(base_url, api_key, row)
    return "very good"

async def of_four(base_url, api_key, row, settings):
    return 1.0

async def of_any(*arguments):
    return await run(*arguments)

async def silent(base_url, api_key, row):
    return 1.0

async def slow(base_url, api_key, row):
    await run(base_url, api_key, row)
    await asyncio.sleep(60)

def stuck(base_url, api_key, row):
    plain(base_url, api_key, row)
    time.sleep(20)

two = run, plain
'''

PROGRAM = """
import json, os, sys
import openai
row = json.loads(os.environ["VERL_ROW"])
client = openai.OpenAI()
answer = client.chat.completions.create(
    model="any", messages=[{"role": "user", "content": row["question"]}], max_tokens=6
)
if len(sys.argv) > 1:
    sys.exit("the program gave up")
with open(os.environ["VERL_RESULT"], "w") as file:
    json.dump({"reward": row["weight"], "text": answer.choices[0].message.content}, file)
"""


PROMPT = [{"role": "user", "content": "a prompt"}]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen2")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "agents.py"
    path.write_text(AGENTS)
    return path


def play(
    model: Any, rows: int = 2, causes: dict[str, str] | None = None, **settings: Any
) -> tuple[list[list[Trajectory]], dict[str, int]]:
    """Play `rows` episodes concurrently. `causes` gets the reasons of those without trajectory."""
    client = client_of(make_engine(model, max_model_len=256))
    config = GatewayConfig(**settings)

    agent = load_agent(config.path, config.name, config.command)

    async def batch():
        async with gateway_loop(
            agent, config, client, wording_of(), max_prompt_tokens=64, max_response_tokens=128
        ) as loop:
            episodes = []
            for row in range(rows):
                fields = {"question": f"q{row}", "weight": np.float32(row / 2)}
                episodes.append(Episode(row=row, messages=PROMPT, prompt_ids=(), fields=fields))
            played = await asyncio.gather(*map(loop.play, episodes))
            assert list(loop.causes) == [
                episode.name for episode, got in zip(episodes, played) if not got
            ]
            if causes is not None:
                causes.update(loop.causes)
            return played, loop.counts()

    try:
        return asyncio.run(client.serve(batch()))
    finally:
        agent.close()


def test_coroutine_function(model, file: Path):
    played, counts = play(model, path=str(file))
    for row, (trajectory,) in enumerate(played):
        assert trajectory.row == row
        assert trajectory.reward == len(trajectory.response_ids)
    assert counts["finished"] == counts["trajectories"] == 2


def test_plain_function_runs_in_a_thread(model, file: Path):
    played, _ = play(model, path=str(file), name="plain")
    assert [each[0].reward for each in played] == [0.25, 0.25]
    assert [each[0].extra["note"] for each in played] == ["q0", "q1"]
    assert played[0][0].extra["reward_extra_info"] == {"note": "q0"}, "num_turns is the trainer's"


def test_blocking_agent_does_not_stop_the_engine(model, file: Path):
    played, _ = play(model, path=str(file), name="blocking")
    assert [each[0].reward for each in played] == [None, None], "the reward function scores them"


def test_failed_session_is_dropped_and_counted(model, file: Path):
    causes: dict[str, str] = {}
    played, counts = play(model, path=str(file), name="failing", rows=3, causes=causes)
    assert [len(each) for each in played] == [1, 0, 1]
    assert counts["failed"] == counts["failed/error"] == 1
    assert counts["trajectories"] == 2
    assert re.search(r"raised KeyError \(.*agents.py:\d+\): 'no such tool'", causes["0-1"])


def test_non_numeric_reward_is_a_failure(model, file: Path):
    causes: dict[str, str] = {}
    played, counts = play(model, path=str(file), name="wrong", rows=2, causes=causes)
    assert played == [[], []]
    assert counts["failed"] == 2
    assert all("must return a finite number" in causes[session] for session in ("0-0", "0-1"))


def test_session_without_a_reply_is_empty(model, file: Path):
    played, counts = play(model, path=str(file), name="silent", rows=1)
    assert played == [[]]
    assert counts["empty"] == 1
    assert counts["failed"] == 0


@pytest.mark.parametrize("name", ["slow", "stuck"])
def test_episode_ends_at_its_deadline(model, file: Path, name: str):
    played, counts = play(model, path=str(file), name=name, timeout_s=1.0, rows=1)
    assert played == [[]]
    assert counts["failed/timeout"] == 1


def test_episode_without_requests_is_abandoned(model, file: Path):
    played, counts = play(model, path=str(file), name="slow", idle_s=0.3, rows=1)
    assert played == [[]]
    assert counts["abandoned"] == 1


@pytest.mark.slow
def test_program(model, tmp_path: Path):
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    played, _ = play(model, command=f"{sys.executable} {program}", rows=2)
    assert [each[0].reward for each in played] == [0.0, 0.5]
    wording = wording_of()
    for (trajectory,) in played:
        assert trajectory.extra["text"] == wording.decode(trajectory.response_ids)


def test_failed_program_is_dropped_with_its_last_output(model, tmp_path: Path):
    program = tmp_path / "agent.py"
    program.write_text(PROGRAM)
    causes: dict[str, str] = {}
    command = f"{sys.executable} {program} --fail"
    played, counts = play(model, command=command, rows=1, causes=causes)
    assert played == [[]]
    assert counts["failed/error"] == 1
    assert "exit code 1: the program gave up" in causes["0-0"]


def test_program_is_killed_with_its_children(model, tmp_path: Path):
    program = tmp_path / "agent.sh"
    alive = tmp_path / "alive"
    program.write_text(
        textwrap.dedent(f"""\
            (sleep 1; touch {alive}) &
            sleep 30
        """)
    )
    _, counts = play(model, command=f"sh {program}", timeout_s=0.3, rows=1)
    assert counts["failed/timeout"] == 1

    asyncio.run(asyncio.sleep(1.2))
    assert not alive.exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "Set one of .*gateway.path and .*gateway.command, got neither"),
        ({"path": "a.py", "command": "b"}, "got both"),
        (
            {"path": "absent.py"},
            r"gateway\.path: expected a Python file at 'absent\.py', found none",
        ),
        ({"path": "FILE", "name": "runn"}, "has no 'runn'. Nearest names in it: run"),
        ({"path": "FILE", "name": "two"}, "must be a function"),
        ({"path": "FILE", "name": "ask"}, r"must take \(base_url, api_key, row\), got \(client"),
        ({"path": "FILE", "name": "of_four"}, "missing a required argument: 'settings'"),
        ({"command": " "}, "must name a program"),
        ({"command": "nodee agent.js"}, "must begin with a program, got 'nodee', which is none on"),
        ({"command": "node 'agent.js"}, "a shell reads them, got .*No closing quotation"),
    ],
)
def test_missing_agent_is_an_error(file: Path, settings: dict[str, str], says: str):
    given = {name: value.replace("FILE", str(file)) for name, value in settings.items()}
    arguments: dict[str, Any] = {"path": None, **given}
    with pytest.raises(ConfigError, match=says):
        load_agent(**arguments)


def test_an_agent_may_take_any_arguments(file: Path):
    agent = load_agent(str(file), "of_any")
    agent.close()


@pytest.mark.parametrize(
    ("result", "reward", "extra"),
    [
        (1, 1.0, {}),
        (True, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        (None, None, {}),
        ({"reward": 2, "steps": 3}, 2.0, {"steps": 3}),
        ({"steps": 3}, None, {"steps": 3}),
    ],
)
def test_results(result: Any, reward: float | None, extra: dict[str, Any]):
    assert read_reward(result) == (reward, extra)


@pytest.mark.parametrize("result", ["1.0", math.nan, math.inf, 10**400, [1], {"reward": "high"}])
def test_invalid_results_are_errors(result: Any):
    with pytest.raises(AgentError, match="must return a finite number"):
        read_reward(result)
