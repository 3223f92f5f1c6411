"""A model alone behind the server, as unmodified clients of OpenAI's see it."""

import asyncio
import json
import socket
from typing import Any

import aiohttp
import openai
import pytest

from tests.agents.gateway.stand_ins import END, KEY, model_that_says, served, wording_of
from tests.rollout.engines import forward_log_probs, make_engine, transformers_greedy
from tests.tiny_models import tiny_model
from verl.agents.gateway.served import ServedEngine
from verl.agents.gateway.wording import TextStream
from verl.rollout import SamplingParams
from verl.utils.errors import ConfigError

HELLO: Any = [{"role": "user", "content": "Hello"}]
WEATHER: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
DIALOGUE = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": f"I look. {CALL}"},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def caller():
    """Train a model that calls a tool."""
    return model_that_says(DIALOGUE)


def test_greedy_chat_matches_transformers(model):
    async def ask():
        async with served(model) as (_, client):
            return await client.chat.completions.create(
                model="tiny",
                messages=HELLO,
                temperature=0,
                max_tokens=12,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )

    answer = asyncio.run(ask())
    wording = wording_of()
    prompt = wording.chat_prompt(HELLO, ())
    assert answer.model_extra["prompt_token_ids"] == prompt
    expected = transformers_greedy(model, prompt, 12)
    if END in expected:
        expected = expected[: expected.index(END) + 1]
    choice = answer.choices[0]
    assert choice.model_extra["token_ids"] == expected
    assert choice.message.content == wording.decode(expected)
    assert answer.usage.completion_tokens == len(expected)
    assert answer.usage.prompt_tokens == len(prompt)

    log_probs = [each.logprob for each in choice.logprobs.content]
    expected_log_probs = forward_log_probs(model, prompt, expected).tolist()
    assert log_probs == pytest.approx(expected_log_probs, abs=1e-4)
    assert "".join(each.token for each in choice.logprobs.content).startswith(
        choice.message.content[:5]
    )


def test_stream_has_the_parts_of_the_complete_answer(model):
    asked: Any = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 40,
        "seed": 5,
        "n": 2,
        "logprobs": True,
    }

    async def ask():
        async with served(model) as (_, client):
            whole = await client.chat.completions.create(**asked)
            stream = await client.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(ask())
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 20, "text comes while it is drawn"

    for choice in whole.choices:
        parts = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert parts[0].delta.role == "assistant"
        text = "".join(part.delta.content or "" for part in parts)
        assert text == choice.message.content
        assert parts[-1].finish_reason == choice.finish_reason
        tokens = [each for part in parts if part.logprobs for each in part.logprobs.content]
        # One prefill computes both choices here, and one prefill each there.
        assert [each.logprob for each in tokens] == pytest.approx(
            [each.logprob for each in choice.logprobs.content], abs=1e-4
        )
    assert whole.choices[0].message.content != whole.choices[1].message.content


def test_seed_gives_the_same_tokens_with_other_requests(model):
    async def ask():
        async with served(model) as (_, client):

            def draw(seed):
                return client.completions.create(
                    model="tiny", prompt="abc", max_tokens=16, seed=seed
                )

            alone = await draw(7)
            crowd = await asyncio.gather(*(draw(seed) for seed in (7, 8, 9, None, 7)))
            return alone.choices[0].text, [each.choices[0].text for each in crowd]

    alone, (again, other, *_, third) = asyncio.run(ask())
    assert alone == again == third
    assert alone != other


def test_prompts_as_tokens_and_as_text(model):
    async def ask():
        async with served(model) as (_, client):
            ids = wording_of().text_prompt("abc")
            draw: Any = {"model": "tiny", "max_tokens": 8, "temperature": 0, "logprobs": 0}
            text = await client.completions.create(prompt="abc", **draw)
            tokens = await client.completions.create(prompt=ids, **draw)
            both = await client.completions.create(prompt=["abc", "xyz"], n=2, **draw)
            return text, tokens, both

    text, tokens, both = asyncio.run(ask())
    assert text.choices[0].text == tokens.choices[0].text == both.choices[1].text
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[2].text != both.choices[0].text
    assert both.usage.prompt_tokens == 6
    log_probs = text.choices[0].logprobs
    assert len(log_probs.tokens) == len(log_probs.token_logprobs) == 8
    assert "".join(log_probs.tokens) == text.choices[0].text


@pytest.mark.parametrize(("streams", "choice"), [(False, "auto"), (True, "required")])
def test_tool_call(caller, streams: bool, choice: str):
    async def ask(client, messages):
        asked: Any = {"model": "tiny", "messages": messages, "temperature": 0}
        asked |= {"tools": WEATHER, "tool_choice": choice}
        if not streams:
            return (await client.chat.completions.create(**asked)).choices[0]
        async with client.chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            return (await stream.get_final_completion()).choices[0]

    async def talk():
        async with served(caller) as (_, client):
            first = await ask(client, DIALOGUE[:1])
            call = first.message.tool_calls[0]
            result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
            reply = first.message.model_dump(exclude_none=True)
            # The template of this model shows the text alone.
            reply["content"] = DIALOGUE[1]["content"]
            return first, await ask(client, [DIALOGUE[0], reply, result])

    first, second = asyncio.run(talk())
    assert first.finish_reason == "tool_calls"
    assert first.message.content == "I look."
    call = first.message.tool_calls[0]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert second.message.content == "It rains."
    assert second.message.tool_calls is None
    assert second.finish_reason == "stop"


@pytest.mark.parametrize("streams", [False, True])
def test_stop_string_is_removed(caller, streams: bool):
    async def ask():
        async with served(caller) as (_, client):
            asked: Any = {
                "model": "tiny",
                "messages": DIALOGUE[:1],
                "temperature": 0,
                "stop": ["look", "zz"],
            }
            if not streams:
                return (await client.chat.completions.create(**asked)).choices[0].message.content
            stream = await client.chat.completions.create(**asked, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == "I "


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"temperature": 200}, 400, "temperature must be a number from 0 to 100, got 200"),
        ({"n": 0}, 400, "n must be a whole number from 1 to 128, got 0"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty=0.5 would change the answer"),
        ({"response_format": {"type": "json_object"}}, 400, "would change the answer"),
        ({"top_logprobs": 3, "logprobs": True}, 400, "only 0 is accepted"),
        ({"tool_choice": NAMED, "tools": WEATHER}, 400, "the draw is not constrained"),
        ({"extra_body": {"best_guess": 1}}, 400, "'best_guess' is not supported"),
        ({"messages": []}, 400, "messages must be a list with at least one message"),
        ({"messages": [{"role": "user"}]}, 400, "message 0 lacks its content"),
        ({"messages": [{"content": "x"}]}, 400, "message 0 lacks its role"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, 400, "leaves no room"),
        ({"stop": ["a", ""]}, 400, "stop must be a text or a list of texts, none of them empty"),
        ({"model": "other"}, 404, "this server has 'tiny'"),
        ({"seed": True}, 400, "seed must be a whole number"),
    ],
)
def test_unsupported_requests_are_rejected(model, fields, status: int, says: str):
    async def ask():
        async with served(model) as (_, client):
            asked = {"model": "tiny", "messages": HELLO, **fields}
            with pytest.raises(openai.APIStatusError) as refused:
                await client.chat.completions.create(**asked)
            return refused.value

    refused = asyncio.run(ask())
    assert refused.status_code == status
    assert says in str(refused)


def test_tools_need_a_format(model):
    async def ask():
        async with served(model, with_tools=False) as (_, client):
            with pytest.raises(openai.BadRequestError, match="format of tool calls is not known"):
                await client.chat.completions.create(model="tiny", messages=HELLO, tools=WEATHER)

    asyncio.run(ask())


def test_too_long_prompt_has_the_usual_error_code(model):
    async def ask():
        async with served(model) as (_, client):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.completions.create(model="tiny", prompt=[7] * 256)
            return refused.value

    assert asyncio.run(ask()).code == "context_length_exceeded"


# ---------------------------------------------------------------- HTTP


def test_invalid_requests_are_rejected(model):
    url = "/v1/chat/completions"
    key = {"Authorization": f"Bearer {KEY}"}
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 2}

    async def ask():
        answers = {}
        async with (
            served(model, max_request_mib=0.01) as (server, _),
            aiohttp.ClientSession() as http,
        ):

            async def post(name, path=url, **options):
                async with http.post(f"{server.url}{path}", **options) as answer:
                    answers[name] = (answer.status, (await answer.json()), answer.headers)

            await post("no key", json=body)
            await post("wrong key", json=body, headers={"Authorization": "Bearer sk-other"})
            await post("basic", json=body, headers={"Authorization": f"Basic {KEY}"})
            await post("page", json=body, headers={**key, "Origin": "https://example.com"})
            await post("sandboxed page", json=body, headers={**key, "Origin": "null"})
            await post("own", json=body, headers={**key, "Origin": server.url})
            await post("not JSON", data=b"{", headers=key)
            await post("deep", data=b"[" * 5000, headers=key)
            await post("a list", json=[1], headers=key)
            await post("large", data=b" " * 20_000, headers=key)
            await post("no route", "/v1/embeddings", json=body, headers=key)
            await post("session", "/sessions/a/v1/chat/completions", json=body, headers=key)
            async with http.options(
                f"{server.url}{url}", headers={"Origin": "https://e.com"}
            ) as own:
                answers["preflight"] = (own.status, await own.json(), own.headers)
            async with http.get(f"{server.url}{url}", headers=key) as own:
                answers["GET"] = (own.status, await own.json(), own.headers)
            async with http.get(f"{server.url}/health") as own:
                answers["health"] = (own.status, await own.json(), own.headers)
            async with http.get(f"{server.url}/v1/models") as own:
                answers["models"] = (own.status, await own.json(), own.headers)
        return answers

    answers = asyncio.run(ask())
    assert {name: status for name, (status, *_) in answers.items()} == {
        "no key": 401,
        "wrong key": 401,
        "basic": 401,
        "page": 403,
        "sandboxed page": 403,
        "own": 200,
        "not JSON": 400,
        "deep": 400,
        "a list": 400,
        "large": 413,
        "no route": 404,
        "session": 404,
        "preflight": 403,
        "GET": 405,
        "health": 200,
        "models": 401,
    }

    for status, answer, headers in answers.values():
        assert not [name for name in headers if name.lower().startswith("access-control")]
        assert status == 200 or answer["error"]["message"]
    assert "the base URL of a client ends with /v1" in answers["no route"][1]["error"]["message"]


def test_list_of_models(model):
    async def ask():
        async with served(model) as (_, client):
            listed = [each.id async for each in client.models.list()]
            found = await client.models.retrieve("tiny")
            with pytest.raises(openai.NotFoundError) as missing:
                await client.models.retrieve("other/model")
            return listed, found.id, missing.value.code

    assert asyncio.run(ask()) == (["tiny"], "tiny", "model_not_found")


@pytest.mark.parametrize("streams", [False, True])
def test_the_responses_api_is_refused_with_the_way_to_the_other(model, streams: bool):
    async def ask():
        async with served(model) as (_, client):
            await client.responses.create(model="tiny", input="Hello", stream=streams)

    with pytest.raises(
        openai.NotFoundError, match="chat/completions is. Tell the client"
    ) as caught:
        asyncio.run(ask())
    assert caught.value.code == "unsupported_api"


def test_port_in_use_is_an_error(model):
    async def ask():
        with socket.create_server(("127.0.0.1", 0)) as other:
            async with served(model, port=other.getsockname()[1]):
                pass

    with pytest.raises(ConfigError, match="Cannot listen on 127.0.0.1"):
        asyncio.run(ask())


# ---------------------------------------------------------------- the engine's queue


def test_disconnected_client_aborts_its_request(model):
    engine = make_engine(model, max_model_len=256)

    async def ask():
        async with served(model, engine=engine) as (server, client):
            asking = client.completions.create(model="tiny", prompt="abc", n=32, max_tokens=250)
            asked = asyncio.ensure_future(asking)
            while not engine.has_work:
                await asyncio.sleep(0.001)
            asked.cancel()
            while engine.has_work:
                await asyncio.sleep(0.001)
            counts = server.backend.engine.counts
            assert counts["aborted"] == 1
            assert counts["requests"] == 0
            short = await client.completions.create(model="tiny", prompt="abc", max_tokens=2)
            return short.usage.completion_tokens

    assert asyncio.run(ask()) <= 2


def test_slow_answer_is_an_error(model):
    async def ask():
        async with served(model, timeout_s=0.01) as (_, client):
            with pytest.raises(openai.APIStatusError) as late:
                await client.completions.create(model="tiny", prompt="abc", n=32, max_tokens=250)
            return late.value.status_code

    assert asyncio.run(ask()) == 504


def test_other_sampling_parameters_wait_in_order(model):
    """Serve requests in the order of arrival."""
    engine = make_engine(model, max_model_len=256)
    queue = ServedEngine(engine)
    ended = []

    async def draw(name: str, temperature: float, limit: int):
        params = SamplingParams(max_new_tokens=256, temperature=temperature, ignore_eos=True)
        await queue.draw([7, 8, 9], params, limit=limit)
        ended.append(name)

    async def ask():
        running = asyncio.ensure_future(queue.run())
        await asyncio.gather(
            draw("warm, long", 1.0, 60),
            draw("warm, short", 1.0, 5),
            draw("cold", 0.5, 5),
            draw("warm, late", 1.0, 1),
        )
        running.cancel()

    asyncio.run(ask())
    assert ended == ["warm, short", "warm, long", "cold", "warm, late"]


def test_requests_at_work_and_requests_that_wait_end_with_the_server(model):
    queue = ServedEngine(make_engine(model, max_model_len=256))

    def draw(temperature: float):
        params = SamplingParams(max_new_tokens=256, temperature=temperature, ignore_eos=True)
        return asyncio.ensure_future(queue.draw([7, 8, 9], params, limit=200))

    async def ask():
        running = asyncio.ensure_future(queue.run())
        draws = [draw(1.0), draw(0.5)]  # the second one waits for the first
        while not queue.engine.has_work:
            await asyncio.sleep(0)
        running.cancel()
        return await asyncio.wait_for(asyncio.gather(*draws, return_exceptions=True), 20)

    ends = asyncio.run(ask())
    assert [str(end) for end in ends] == ["The server is shutting down."] * 2


def test_rejected_request_does_not_affect_others(model):
    queue = ServedEngine(make_engine(model, max_model_len=256))
    params = SamplingParams(max_new_tokens=256, ignore_eos=True)

    async def ask():
        running = asyncio.ensure_future(queue.run())
        answers = await asyncio.gather(
            queue.draw([7, 8], params, limit=30),
            queue.draw([7, 10_000], params, limit=30),
            queue.draw([7, 9], params, limit=30),
            return_exceptions=True,
        )
        running.cancel()
        return answers

    good, bad, other = asyncio.run(ask())

    assert len(good[0].token_ids) == len(other[0].token_ids) == 30
    assert "10000" in str(bad)


def test_text_is_streamed_in_whole_characters():
    class Bytes:
        """One token a byte, as in tokenizers of bytes."""

        all_special_ids = ()

        def decode(self, ids, skip_special_tokens):
            return bytes(ids).decode("utf-8", errors="replace")

    text = "naïve 漢字 STOP"
    stream = TextStream(wording_like(Bytes()), ("STOP",))
    pieces = [stream.push([byte]) for byte in text.encode()]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.finish("naïve 漢字 ") == "naïve 漢字 "
    assert sum(bool(piece) for piece in pieces) > 5


def wording_like(tokenizer: Any) -> Any:
    from verl.agents.gateway.wording import Wording

    return Wording(tokenizer, boundary=None)  # pyright: ignore[reportArgumentType]
