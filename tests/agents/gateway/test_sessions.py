"""Sessions become trajectories of exactly the drawn tokens."""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from tests.agents.gateway.stand_ins import (
    END,
    BrokenBoundary,
    client_of,
    model_that_says,
    recorder_of,
    training,
    wording_of,
)
from tests.agents.gateway.test_served import CALL, DIALOGUE, HELLO, NAMED, WEATHER
from tests.rollout.engines import forward_log_probs, make_engine
from tests.tiny_models import tiny_model
from verl.agents.gateway.recorder import SessionRecorder
from verl.models.load import resolve_path
from verl.rollout.trajectory import Trajectory

EOS = 2
MORE: Any = {"role": "user", "content": "Go on"}


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen2")


async def say(client: AsyncOpenAI, messages: Any, **options: Any) -> Any:
    """Send a conversation. Return the reply as a message that the client would send back."""
    answer = await client.chat.completions.create(
        model="gpt-4o", messages=messages, **{"max_tokens": 12, **options}
    )
    return answer.choices[0].message.model_dump()


def play(
    model: Any,
    agent: Any,
    recorder: SessionRecorder | None = None,
    temperature: float = 1.0,
    stop: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """Run `agent(training)` while the engine serves it."""
    engine = make_engine(model, max_model_len=256)
    client = client_of(engine, temperature=temperature, stop=stop)
    recorder = recorder or recorder_of()

    async def all_of_it():
        async with training(client, recorder, **options) as run:
            return await agent(run)

    return asyncio.run(client.serve(all_of_it()))


def ids_of(trajectory: Trajectory) -> list[int]:
    return [*trajectory.prompt_ids, *trajectory.response_ids]


def sources(trajectory: Trajectory) -> list[str]:
    """Return the sources of the segments; a model segment without training is in brackets."""
    names = []
    for segment in trajectory.segments:
        is_context = segment.is_model and not segment.is_trained
        names.append(f"({segment.source})" if is_context else segment.source)
    return names


def check_log_probs(model: Any, trajectory: Trajectory) -> None:
    """Compare each model's segment with a forward pass of the tokens before it."""
    seen = list(trajectory.prompt_ids)
    for segment in trajectory.segments:
        if segment.is_model:
            expected = forward_log_probs(model, seen, segment.token_ids).tolist()
            assert segment.log_probs == pytest.approx(expected, abs=1e-4)
        seen += segment.token_ids


def test_conversation_is_one_trajectory(model):
    async def agent(run):
        client = run.agent("a", row=3)
        messages = [*HELLO]
        for _ in range(3):
            messages += [await say(client, messages), MORE]
        return run.recorder.finish("a", 0.5)

    (trajectory,) = play(model, agent)
    assert sources(trajectory) == ["model", "user", "model", "user", "model"]
    assert trajectory.row == 3
    assert trajectory.reward == 0.5
    assert trajectory.num_turns == 6
    assert [segment.turn for segment in trajectory.segments] == [0, 1, 1, 2, 2]
    check_log_probs(model, trajectory)
    assert [message["role"] for message in trajectory.extra["messages"]] == [
        *("user", "assistant") * 3
    ]

    # The tokens between the drawn ones are those of the template.
    wording = wording_of()
    new = wording.tokenizer.decode(trajectory.segments[1].token_ids)
    has_ended = trajectory.segments[0].token_ids[-1] in (EOS, END)
    end = "" if has_ended else "<|im_end|>"
    assert new == f"{end}\n<|im_start|>user\nGo on<|im_end|>\n<|im_start|>assistant\n"


def test_agent_draws_the_same_tokens_in_every_run(model):
    async def agent(run):
        async def one(row: int):
            client = run.agent(f"s{row}", row=row)
            messages = [*HELLO]
            for _ in range(2):
                messages += [await say(client, messages), MORE]
            return ids_of(run.recorder.finish(f"s{row}")[0])

        return await asyncio.gather(*(one(row) for row in order))

    order = [0, 1, 2]
    first = play(model, agent)
    order = [2, 0, 1]
    second = play(model, agent)
    assert [first[row] for row in order] == second
    assert first[0] != first[1]


def test_tool_result_extends_the_tool_call():
    """Let the client reformat the arguments and drop unknown fields."""
    caller = model_that_says(DIALOGUE)

    async def agent(run):
        client = run.agent("a")
        reply = await say(client, DIALOGUE[:1], tools=WEATHER, max_tokens=90)
        call = reply["tool_calls"][0]
        call["function"]["arguments"] = json.dumps(
            json.loads(call["function"]["arguments"]), separators=(",", ":")
        )
        back = {"role": "assistant", "content": reply["content"].strip(), "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "rain"}
        last = await say(client, [DIALOGUE[0], back, result], tools=WEATHER)
        return last["content"], run.recorder.finish("a")

    said, (trajectory,) = play(caller, agent, temperature=0)
    assert said == "It rains.", "the model saw its own call, which the messages show otherwise"
    assert sources(trajectory) == ["model", "tool", "model"]

    drawn = wording_of().tokenizer.decode(trajectory.segments[0].token_ids)
    assert drawn == f"I look. {CALL}<|im_end|>"
    check_log_probs(caller, trajectory)


def test_rewritten_history_begins_another_trajectory(model):
    async def agent(run):
        client = run.agent("a")
        reply = await say(client, HELLO)
        await say(client, [*HELLO, {**reply, "content": "Other words"}, MORE])
        await say(client, [{"role": "system", "content": "Be brief"}, *HELLO, reply, MORE])
        await say(client, [*HELLO, reply, MORE], tools=WEATHER)
        return run.recorder.finish("a", 1.0), run.recorder.counts()

    trajectories, counts = play(model, agent)
    assert [sources(each)[-1] for each in trajectories] == ["model"] * 4
    assert [each.part for each in trajectories] == [0, 1, 2, 3]
    assert {each.reward for each in trajectories} == {1.0}
    assert counts["rewritten"] == 3
    for trajectory in trajectories:
        check_log_probs(model, trajectory)
        assert sum(segment.is_trained for segment in trajectory.segments if segment.is_model) == 1


def test_long_prompt_continues_as_context(model):
    async def agent(run):
        client = run.agent("a")
        await say(client, [{"role": "user", "content": "x" * 80}])
        return run.recorder.finish("a")

    (trajectory,) = play(model, agent)
    assert len(trajectory.prompt_ids) == 64
    assert sources(trajectory) == ["template", "model"]
    check_log_probs(model, trajectory)


def test_two_answers_to_one_reply_are_two_trajectories(model):
    """Train the shared tokens once."""

    async def agent(run):
        client = run.agent("a")
        reply = await say(client, HELLO)
        await asyncio.gather(
            say(client, [*HELLO, reply, MORE]),
            say(client, [*HELLO, reply, {"role": "user", "content": "Stop"}]),
        )
        return run.recorder.finish("a"), run.recorder.counts()

    (one, other), counts = play(model, agent)
    assert sources(one) == ["model", "user", "model"]
    assert sources(other) == ["(model)", "user", "model"]
    assert one.segments[0].token_ids == other.segments[0].token_ids
    assert counts["branched"] == 1
    check_log_probs(model, one)
    check_log_probs(model, other)


def test_each_of_several_choices_can_be_continued(model):
    async def agent(run):
        client = run.agent("a")
        answer = await client.chat.completions.create(model="x", messages=HELLO, max_tokens=12, n=3)
        texts = [choice.message.content for choice in answer.choices]
        await say(client, [*HELLO, {"role": "assistant", "content": texts[1]}, MORE])
        return texts, run.recorder.finish("a")

    texts, trajectories = play(model, agent)
    assert len(set(texts)) == 3
    assert [sources(each) for each in trajectories] == [
        ["model"],
        ["model", "user", "model"],
        ["model"],
    ]
    for trajectory in trajectories:
        check_log_probs(model, trajectory)


def test_conversation_without_exact_extension_is_rendered_again(model):
    recorder = recorder_of()
    recorder.wording.boundary = BrokenBoundary(recorder.wording.tokenizer)

    async def agent(run):
        client = run.agent("a")
        reply = await say(client, HELLO)
        await say(client, [*HELLO, reply, MORE])
        return run.recorder.finish("a")

    first, second = play(model, agent, recorder)
    assert sources(first) == ["model"]
    assert sources(second)[-1] == "model"
    check_log_probs(model, second)


def test_plain_prompts_extend_their_recorded_prefix(model):
    async def agent(run):
        client = run.agent("a")
        asked: Any = {"model": "x", "max_tokens": 6, "extra_body": {"return_token_ids": True}}
        first = await client.completions.create(prompt=[7, 8, 9], **asked)
        drawn = first.choices[0].model_extra["token_ids"]
        await client.completions.create(prompt=[7, 8, 9, *drawn, 11, 12], **asked)
        return run.recorder.finish("a")

    (trajectory,) = play(model, agent)
    assert sources(trajectory) == ["model", "user", "model"]
    assert trajectory.segments[1].token_ids == [11, 12]
    check_log_probs(model, trajectory)


def test_stream_is_recorded(model):
    async def agent(run):
        client = run.agent("a")
        stream = await client.chat.completions.create(
            model="x", messages=HELLO, max_tokens=12, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        reply = {"role": "assistant", "content": text}
        await say(client, [*HELLO, reply, MORE])
        return run.recorder.finish("a")

    (trajectory,) = play(model, agent)
    assert sources(trajectory) == ["model", "user", "model"]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"temperature": 0.2}, "temperature=0.2 differs from the rollout's 1.0"),
        ({"top_p": 0.9}, "top_p=0.9 differs from the rollout's 1.0"),
        ({"extra_body": {"top_k": 5}}, "top_k=5 differs from the rollout's -1"),
        ({"seed": 3}, "seed=3 differs from the rollout's"),
        ({"tools": WEATHER, "tool_choice": NAMED}, "the draw is not constrained"),
        ({"parallel_tool_calls": False}, "would change the answer"),
    ],
)
def test_other_sampling_parameters_are_rejected(model, asked, says: str):
    async def agent(run):
        client = run.agent("a")
        with pytest.raises(openai.BadRequestError) as refused:
            await say(client, HELLO, **asked)
        await say(client, HELLO, temperature=1.0, top_p=1)
        return str(refused.value), run.recorder.finish("a")

    message, trajectories = play(model, agent)
    assert says in message
    assert len(trajectories) == 1

    async def lenient(run):
        await say(run.agent("a"), HELLO, **asked)
        return run.recorder.finish("a")

    assert ids_of(play(model, lenient, on_mismatch="ignore")[0]) == ids_of(trajectories[0])


def test_stop_strings_of_a_request_are_those_of_an_engine(model):
    async def agent(run):
        client = run.agent("a")
        first = await say(client, HELLO, **asked)
        second = await say(client, [*HELLO, first, MORE], **asked)
        return first["content"], second["content"], run.recorder.finish("a")

    asked: dict[str, Any] = {}
    whole, _, _ = play(model, agent)
    stop = whole[2:4]
    *engine_texts, (expected,) = play(model, agent, stop=(stop,))
    asked = {"stop": [stop, "never drawn"]}
    *texts, (trajectory,) = play(model, agent)

    assert texts[0] == whole.partition(stop)[0]
    assert texts == engine_texts
    assert ids_of(trajectory) == ids_of(expected)
    assert len(trajectory.segments[0].token_ids) < 12
    check_log_probs(model, trajectory)


def test_full_response_is_a_standard_error(model):
    async def agent(run):
        client = run.agent("a")
        messages = [*HELLO]
        with pytest.raises(openai.BadRequestError) as refused:
            for _ in range(20):
                messages += [await say(client, messages, max_tokens=None), MORE]
        return refused.value.code, run.recorder.finish("a")

    recorder = recorder_of(max_response_tokens=100)
    code, (trajectory,) = play(model, agent, recorder)
    assert code == "context_length_exceeded"
    assert len(trajectory.response_ids) <= 100
    assert trajectory.segments[-1].is_model


def test_key_opens_only_its_own_session(model):
    async def agent(run):
        one = run.agent("a")
        two = run.agent("b", row=1)
        thief = AsyncOpenAI(base_url=str(one.base_url), api_key=two.api_key, max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await say(thief, HELLO)

        # A client without its own path is identified by its key.
        keyed = AsyncOpenAI(base_url=f"{run.server.url}/v1", api_key=two.api_key, max_retries=0)
        await say(keyed, HELLO)
        return len(run.recorder.finish("b")), len(run.recorder.finish("a"))

    assert play(model, agent) == (1, 0)


def test_ended_session_rejects_requests(model):
    async def agent(run):
        client = run.agent("a")
        await say(client, HELLO)
        run.recorder.finish("a")
        with pytest.raises(openai.APIStatusError) as refused:
            await say(client, HELLO)
        return refused.value

    refused = play(model, agent)
    assert refused.status_code == 410
    assert "does not run: finished" in str(refused)


def test_late_reply_is_not_recorded(model):
    async def agent(run):
        client = run.agent("a")
        late = asyncio.ensure_future(say(client, HELLO, max_tokens=90))
        while not run.recorder.counts()["requests"]:
            await asyncio.sleep(0.001)
        run.recorder.fail("a")
        with pytest.raises(openai.APIStatusError) as refused:
            await late
        return refused.value.status_code, run.recorder.counts()

    status, counts = play(model, agent)
    assert status == 410
    assert counts["failed"] == 1
    assert counts["trajectories"] == 0


def test_client_can_retry_after_a_timeout(model):
    """Leave the aborted reply out of the trajectory."""

    async def agent(run):
        client = run.agent("a")
        reply = await say(client, HELLO)
        messages = [*HELLO, reply, MORE]
        late = asyncio.ensure_future(say(client, messages, max_tokens=150))
        engine = run.client.steps.engine
        while not engine.has_work:
            await asyncio.sleep(0.001)
        late.cancel()
        while engine.has_work:
            await asyncio.sleep(0.001)
        await say(client, messages)
        return run.recorder.finish("a"), run.recorder.counts()

    (trajectory,), counts = play(model, agent)
    assert sources(trajectory) == ["model", "user", "model"]
    assert counts["branched"] == 0
    check_log_probs(model, trajectory)


# ---------------------------------------------------------------- how sessions end


def test_abandoned_sessions_are_dropped_and_counted(model):
    now = [0.0]
    recorder = recorder_of(idle_s=0.2, clock=lambda: now[0])

    async def agent(run):
        gone = run.agent("gone")
        await say(gone, HELLO)
        now[0] = 1.0
        kept = run.agent("kept", row=1)
        reply = await say(kept, HELLO)
        await say(kept, [*HELLO, reply, MORE])
        while run.recorder.is_open("gone"):
            await asyncio.sleep(0.01)
        return run.recorder.finish("kept"), run.recorder.counts()

    (trajectory,), counts = play(model, agent, recorder)

    assert trajectory.row == 1
    assert counts["abandoned"] == 1
    assert counts["finished"] == 1
    assert counts["trajectories"] == 1


def test_running_request_is_not_idle_time():
    now = [0.0]
    recorder = SessionRecorder(
        wording_of(),
        max_prompt_tokens=64,
        max_response_tokens=64,
        idle_s=10,
        clock=lambda: now[0],
    )
    recorder.open("a", row=0)
    turn = recorder.begin_chat("a", HELLO)
    now[0] = 100.0
    assert recorder.drop_idle() == []

    turn.drop()
    now[0] = 109.0
    assert recorder.drop_idle() == []

    now[0] = 110.0
    assert recorder.drop_idle() == ["a"]


def test_a_hundred_sessions_at_once():
    toy = AutoModelForCausalLM.from_pretrained(resolve_path("toy"), attn_implementation="eager")

    async def agent(run):
        http = openai.DefaultAsyncHttpxClient()  # a new client takes longer than a session

        async def one(row: int):
            client = run.agent(f"s{row}", row=row, http_client=http)
            messages: Any = [{"role": "user", "content": str(row % 10)}]
            for _ in range(2):
                reply = await say(client, messages, max_tokens=8)
                messages += [reply, {"role": "user", "content": "1"}]
            return run.recorder.finish(f"s{row}", 1.0)

        played = await asyncio.gather(*(one(row) for row in range(100)))
        return played, run.recorder.counts()

    played, counts = play(toy, agent)
    assert [len(each) for each in played] == [1] * 100
    assert [each[0].row for each in played] == list(range(100))
    assert all(sources(each[0]) == ["model", "user", "model"] for each in played)
    assert counts["requests"] == 200
    assert counts["finished"] == 100
    check_log_probs(toy, played[17][0])
