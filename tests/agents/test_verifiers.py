"""Environments that call the model themselves: a user's own, and those of verifiers."""

import asyncio
import json
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.runs import run, step_lines
from verl.agents.environments import make_environment, verifiers
from verl.utils.errors import DataError, MissingDependencyError
from verl.utils.imports import is_installed

ENVIRONMENT = "actor_rollout_ref.rollout.agent.environment"
SMALL = [
    "data.dataset_name=toy",
    "data.train_batch_size=2",
    "data.max_prompt_length=256",
    "data.max_response_length=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.max_steps=2",
]

needs_verifiers = pytest.mark.skipif(
    not is_installed("verifiers"), reason="needs verifiers (pip install 'verifiers>=0.4')"
)


def gateway_counts(folder: Path) -> list[tuple[float, float]]:
    """Return the finished and the failed sessions of every step."""
    lines = step_lines(folder)
    return [
        (line["agent_loop/gateway/finished"], line["agent_loop/gateway/failed"]) for line in lines
    ]


# ---- a user's own --------------------------------------------------------------------------------


def test_an_environment_that_plays_itself_is_reached_through_the_gateway(tmp_path: Path):
    (tmp_path / "worlds.py").write_text(
        textwrap.dedent(
            """
            import httpx

            class World:
                def __init__(self, letters):
                    self.letters = letters

                async def play(self, base_url, api_key, row):
                    headers = {"Authorization": f"Bearer {api_key}"}
                    body = {"model": "policy", "messages": row["messages"]}
                    async with httpx.AsyncClient(base_url=base_url, headers=headers) as client:
                        answer = await client.post("chat/completions", json=body, timeout=60)
                    text = answer.json()["choices"][0]["message"]["content"]
                    return sum(letter in self.letters for letter in text) / max(len(text), 1)
            """
        )
    )
    own = [
        f"{ENVIRONMENT}.name={tmp_path}/worlds.py:World",
        f"{ENVIRONMENT}.kwargs={{letters: ae}}",
    ]
    assert run(tmp_path / "run", *own, base=SMALL) == 0
    assert gateway_counts(tmp_path / "run") == [(8, 0), (8, 0)]
    assert all(line["critic/score/max"] > 0 for line in step_lines(tmp_path / "run"))


def test_the_error_of_an_environment_that_plays_itself_is_shown(tmp_path: Path, capfd):
    file = tmp_path / "worlds.py"
    file.write_text(
        "class World:\n"
        "    async def play(self, base_url, api_key, row):\n"
        "        raise KeyError('no such board')\n"
    )
    assert run(tmp_path / "run", f"{ENVIRONMENT}.name={file}:World", base=SMALL) == 1
    expected = f"The first failed: World.play raised KeyError ({file}:3): 'no such board'"
    assert expected in capfd.readouterr().err


# ---- verifiers -----------------------------------------------------------------------------------

TASKSET = """
import verifiers.v1 as vf

__all__ = ["Words"]


class WordTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def vowels(self, trace: vf.Trace) -> float:
        reply = trace.last_reply or ""
        if trace.task.data.prompt == "Say two.":
            raise ValueError("no score for two")
        return sum(letter in "aeiou" for letter in reply) / max(len(reply), 1)


class Words(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        for word in ("one", "two", "three"):
            yield WordTask(vf.TaskData(prompt=f"Say {word}."), self.config.task)
"""
SETTINGS = {
    "taskset": {"id": "verl_test_words"},
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
}


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    (tmp_path / "verl_test_words.py").write_text(TASKSET)
    monkeypatch.syspath_prepend(tmp_path)
    yield SETTINGS
    sys.modules.pop("verl_test_words", None)


@pytest.mark.skipif(is_installed("verifiers"), reason="verifiers is installed")
def test_verifiers_that_is_missing_is_named():
    with pytest.raises(MissingDependencyError, match=r"verifiers.v1.*pip install 'verifiers>=0.4'"):
        make_environment("verifiers", **SETTINGS)


def test_servers_that_failed_to_start_are_started_for_the_next_episode(
    monkeypatch: pytest.MonkeyPatch,
):
    starts = 0

    @asynccontextmanager
    async def serving() -> AsyncIterator[None]:
        nonlocal starts
        starts += 1
        if starts == 1:
            raise OSError("no port is free")
        yield

    world = SimpleNamespace(taskset=(), serving=serving)
    library = SimpleNamespace(resolve_env_config=dict, load_environment=lambda config: world)
    monkeypatch.setattr(verifiers, "verifiers_library", lambda: library)
    environment = verifiers.VerifiersEnvironment()

    async def play_two() -> None:
        with pytest.raises(OSError, match="no port is free"):
            async with environment._serving():
                pass
        async with environment._serving():
            pass

    asyncio.run(play_two())
    assert starts == 2


@needs_verifiers
def test_rows_name_the_tasks_of_a_taskset(taskset: dict[str, Any]):
    environment = make_environment("verifiers", **taskset)
    rows = environment.rows(3)
    assert [row["prompt"][0]["content"] for row in rows] == ["Say one.", "Say two.", "Say three."]
    assert [environment.task(row).data.prompt for row in rows[::-1]] == [
        "Say three.",
        "Say two.",
        "Say one.",
    ]
    with pytest.raises(DataError, match="task=3 is beyond the taskset, which has 3 tasks"):
        environment.task({"extra_info": {"task": 3}})
    with pytest.raises(DataError, match=r"needs extra_info.task.*got None"):
        environment.task({"extra_info": {}})


@needs_verifiers
def test_tasks_of_verifiers_train_and_those_that_fail_are_dropped(
    tmp_path: Path, taskset: dict[str, Any]
):
    rows = tmp_path / "rows.jsonl"
    written = make_environment("verifiers", **taskset).rows(3)
    rows.write_text("\n".join(json.dumps(row) for row in written))
    base = [*SMALL, f"data.train_files={rows}", f"data.val_files={rows}", "data.shuffle=False"]
    base = [line for line in base if not line.startswith("data.dataset_name")]
    own = [
        f"{ENVIRONMENT}.name=verifiers",
        f"{ENVIRONMENT}.kwargs={{taskset: {{id: verl_test_words}}, "
        "agent: {harness: {id: 'null'}, runtime: {type: subprocess}}}",
        "actor_rollout_ref.model.path=toy",
        "algorithm.adv_estimator=grpo",
        "trainer.max_steps=1",
    ]
    assert run(tmp_path / "run", *own, base=base) == 0
    assert gateway_counts(tmp_path / "run") == [(4, 4)]  # "Say two." has no score
    (line,) = step_lines(tmp_path / "run")
    assert line["agent_loop/dropped"] == 4
    assert line["critic/score/max"] > 0
