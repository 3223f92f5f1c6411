"""Many agents on one engine: their tokens, and their failures."""

import asyncio
import random
from typing import Any

import pytest

from tests.rollout.engines import PROMPTS, make_engine, run, talkative_model, tokens_of
from verl.agents.engine_client import EngineClient, EngineSteps, Work
from verl.rollout import Completion, Room, SamplingParams
from verl.utils.errors import RolloutError

PARAMS = SamplingParams(max_new_tokens=12)


def client_of(engine, *, seed: int = 0, step: int = 0, **options) -> EngineClient:
    return EngineClient(EngineSteps(engine, PARAMS, seed, step), max_model_len=128, **options)


async def all_of(*calls):
    return await asyncio.gather(*calls)


@pytest.mark.parametrize("name", ["embedded", "hf"])
def test_first_turns_are_the_tokens_of_a_plain_rollout(name: str):
    model = talkative_model("qwen2")
    plain = run(make_engine(model, name), PROMPTS, n=2, max_new_tokens=12, seed=3, step=5)
    client = client_of(make_engine(model, name), seed=3, step=5)
    calls = [client.generate(prompt_ids=PROMPTS[row // 2], row=row) for row in range(6)]
    drawn = asyncio.run(client.serve(all_of(*calls)))
    assert [each.token_ids for each in drawn] == tokens_of(plain)
    assert [each.log_probs for each in drawn] == [pytest.approx(each.log_probs) for each in plain]
    assert client.counters["generated_tokens"] == sum(len(each.token_ids) for each in plain)


@pytest.mark.parametrize("reserved", [False, True])
def test_tokens_do_not_depend_on_the_order_of_agents(reserved: bool):
    engine = make_engine(talkative_model("qwen2"), deterministic=True, max_model_len=128)
    if reserved:
        engine.reserve(Room(sequences=8, tokens=128))

    async def agent(client: EngineClient, row: int, pauses: random.Random) -> list[list[int]]:
        ids = list(PROMPTS[row % 3])
        turns = []
        for turn in range(3):
            await asyncio.sleep(pauses.random() / 200)
            drawn = await client.generate(prompt_ids=ids, row=row, turn=turn)
            turns.append(drawn.token_ids)
            ids = [*ids, *drawn.token_ids, 7, 9]
        return turns

    def play(order: int) -> list[list[list[int]]]:
        client = client_of(engine)
        pauses = random.Random(order)
        return asyncio.run(client.serve(all_of(*(agent(client, r, pauses) for r in range(8)))))

    first = play(1)
    assert play(2) == first

    turns = [tuple(tokens) for episode in first for tokens in episode]
    assert len(set(turns)) > 12, "turns and rows have noise of their own"
    engine.check_integrity()


def test_cancelled_agent_leaves_nothing_in_the_engine():
    engine = make_engine(talkative_model("qwen2"))
    client = client_of(engine)

    async def work() -> list[int]:
        slow = asyncio.ensure_future(client.generate(prompt_ids=PROMPTS[0], row=0))
        other = asyncio.ensure_future(client.generate(prompt_ids=PROMPTS[1], row=1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        slow.cancel()
        answer = await other
        with pytest.raises(asyncio.CancelledError):
            await slow
        return answer.token_ids

    alone = run(make_engine(talkative_model("qwen2")), PROMPTS[:2], max_new_tokens=12)[1]
    assert asyncio.run(client.serve(work())) == alone.token_ids
    assert not engine.has_work
    engine.check_integrity()


class Emptied:
    """An engine of a user's that steps only with work, as a run has it after an abort."""

    has_work = False

    def __init__(self) -> None:
        self.aborted = []

    def abort(self, sample_ids: set[int]) -> list[Completion]:
        self.aborted += sample_ids
        return []

    def step(self) -> list[Completion]:
        raise IndexError("pop from empty list")


def test_an_engine_without_work_takes_no_step():
    """Its error hid the one that the episodes were aborted for."""
    engine: Any = Emptied()
    steps = EngineSteps(engine, SamplingParams(max_new_tokens=4), seed=0, step=1)
    assert steps.take(Work([], {3})) == ([], {})
    assert engine.aborted == [3]


def test_too_long_prompt_fails_only_its_agent():
    client = client_of(make_engine(talkative_model("qwen2")))

    async def work() -> int:
        good = client.generate(prompt_ids=PROMPTS[0], row=0)
        bad = client.generate(prompt_ids=[1] * 4000, row=1)
        answers = await asyncio.gather(good, bad, return_exceptions=True)
        assert isinstance(answers[1], RolloutError)
        assert "leaves no room for a response" in str(answers[1])
        assert not isinstance(answers[0], BaseException)
        return len(answers[0].token_ids)

    assert asyncio.run(client.serve(work())) > 0


def test_engine_error_stops_all_agents(monkeypatch):
    engine = make_engine(talkative_model("qwen2"))
    client = client_of(engine)

    def fail() -> None:
        raise RolloutError("the device is gone")

    monkeypatch.setattr(engine, "step", fail)
    with pytest.raises(RolloutError, match="the device is gone"):
        asyncio.run(client.serve(client.generate(prompt_ids=PROMPTS[0], row=0)))


def test_samples_of_one_prompt_share_its_prefill():
    engine = make_engine(talkative_model("qwen2"), deterministic=True)
    client = client_of(engine)
    calls = [client.generate(prompt_ids=PROMPTS[1], row=row) for row in range(4)]
    asyncio.run(client.serve(all_of(*calls)))
    assert client.counters["prefill_tokens"] == len(PROMPTS[1])


def test_an_agent_that_draws_while_it_is_cancelled_cannot_keep_a_failed_run_alive():
    engine = make_engine(talkative_model("qwen2"))
    client = client_of(engine)
    seen = []

    async def agent() -> None:
        try:
            await client.generate(prompt_ids=PROMPTS[0], row=0)
        finally:
            with pytest.raises(RolloutError, match="are over; no turn can be drawn"):
                await client.generate(prompt_ids=PROMPTS[0], row=0, turn=1)
            seen.append("ended")

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    engine.step = fail
    with pytest.raises(MemoryError, match="no room"):
        asyncio.run(asyncio.wait_for(client.serve(agent()), 5))
    assert seen == ["ended"]
