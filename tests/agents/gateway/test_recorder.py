"""Session recorder: each drawn token is trained once in its context, for any order of requests."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import DataObject, data, integers, sampled_from

from tests.agents.gateway.stand_ins import END, recorder_of, wording_of
from verl.agents.engine_client import Generated
from verl.agents.gateway.errors import TOO_LONG, ApiError
from verl.agents.gateway.recorder import SessionRecorder, Turn, conversation_name
from verl.agents.gateway.requests import ChatRequest

WORDING = wording_of()
SYSTEM = {"role": "system", "content": "Be kind."}


@dataclass
class Client:
    """A client with many conversations in one session, several of them at a time."""

    recorder: SessionRecorder
    open_turns: list[tuple[Turn, list[Any]]] = field(default_factory=list)
    conversations: list[list[Any]] = field(default_factory=list)
    drawn: list[tuple[list[int], list[int]]] = field(default_factory=list)  # prompt, reply

    def ask(self, history: list[Any], text: str, choices: int) -> None:
        messages = [*history, {"role": "user", "content": text}]
        try:
            turn = self.recorder.begin_chat("a", messages, (), choices)
        except ApiError as error:
            if error.code != TOO_LONG:
                raise
            return
        self.open_turns.append((turn, messages))

    def answer(self, number: int, length: int) -> None:
        """Record the replies of an open turn: tokens that tell turns and choices apart."""
        turn, messages = self.open_turns.pop(number)
        replies = []
        drawn = []
        for choice in turn.numbers:
            ids = [10 + (choice * 7 + place) % 80 for place in range(min(length, turn.room))]
            ids[-1] = END if length % 2 else ids[-1]
            generated = Generated(
                token_ids=ids,
                log_probs=[-1.0] * len(ids),
                finish_reason="stop",
                version=choice,
                versions=[choice, *range(len(ids) - 1)],
                routed_experts=np.array(ids)[:, None],
            )
            drawn.append(generated)
            replies.append(asyncio.run(WORDING.reply(turn.prompt_ids, generated)))
            self.drawn.append((list(turn.prompt_ids), ids))
            self.conversations.append([*messages, replies[-1].message])
        turn.record(replies, drawn)

    def give_up(self, number: int) -> None:
        turn, _ = self.open_turns.pop(number)
        turn.drop()


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data())
def test_each_drawn_token_is_trained_once_in_its_context(values: DataObject):
    client = Client(recorder_of(max_prompt_tokens=40, max_response_tokens=300))
    client.recorder.open("a", row=5)
    for _ in range(values.draw(integers(1, 14), "actions")):
        action = values.draw(sampled_from(["ask", "ask", "answer", "answer", "give up"]))
        if action == "ask" or not client.open_turns:
            known = [[], [SYSTEM], *client.conversations]
            history = values.draw(sampled_from(known), "history")
            text = values.draw(sampled_from(["x", "yes", "a longer question"]))
            client.ask(history, text, values.draw(integers(1, 2), "choices"))
            continue
        number = values.draw(integers(0, len(client.open_turns) - 1), "turn")
        if action == "answer":
            client.answer(number, values.draw(integers(1, 9), "length"))
        else:
            client.give_up(number)

    learned = []
    for trajectory in client.recorder.finish("a", 1.0):
        assert trajectory.segments[-1].is_model
        assert len(trajectory.prompt_ids) <= 40
        assert len(trajectory.response_ids) <= 300
        seen = list(trajectory.prompt_ids)
        for segment in trajectory.segments:
            if segment.is_model and segment.is_trained:
                learned.append((list(seen), list(segment.token_ids)))
                assert segment.version == segment.turn
                assert segment.versions == [segment.turn, *range(len(segment.token_ids) - 1)]
                assert segment.routed_experts is not None
                assert segment.routed_experts.flatten().tolist() == segment.token_ids
            seen += segment.token_ids
    assert sorted(learned) == sorted(client.drawn)


def test_chain_of_turns_is_one_trajectory():
    """Choose the longest recorded conversation, and in it the reply that is still free."""
    client = Client(recorder_of())
    client.recorder.open("a", row=0)
    client.ask([], "x", 1)
    client.answer(0, 3)
    for _ in range(3):
        client.ask(client.conversations[-1], "x", 1)
        client.answer(0, 3)
    (trajectory,) = client.recorder.finish("a")
    assert [segment.source for segment in trajectory.segments] == ["model", *["user", "model"] * 3]


REPLY: Any = {
    "role": "assistant",
    "content": "I look. ",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'},
        }
    ],
}


def named(message: Any) -> str:
    """Return the name of a conversation that ends with a message of a client."""
    body = {"model": "x", "messages": [{"role": "user", "content": "Weather?"}, message]}
    return conversation_name(ChatRequest.read(json.dumps(body).encode()).messages, ())


def with_arguments(arguments: str) -> Any:
    call = REPLY["tool_calls"][0]
    function = {**call["function"], "arguments": arguments}
    return {**REPLY, "tool_calls": [{**call, "function": function}]}


@pytest.mark.parametrize(
    "sent",
    [
        {**REPLY, "content": "I look."},
        {**REPLY, "content": [{"type": "text", "text": "I look. "}]},
        {**REPLY, "refusal": None, "annotations": None, "audio": None, "function_call": None},
        {**REPLY, "name": "agent", "reasoning_content": "Hm."},
        {**REPLY, "tool_calls": [{**REPLY["tool_calls"][0], "id": "other", "index": 0}]},
        with_arguments('{"days":2,"city":"Oslo"}'),
    ],
)
def test_reply_is_recognized_in_every_client_format(sent: Any):
    assert named(sent) == named(REPLY)


@pytest.mark.parametrize(
    "sent",
    [
        {**REPLY, "content": "I looked."},
        {**REPLY, "role": "user", "tool_calls": None},
        {**REPLY, "tool_calls": None},
        {**REPLY, "tool_calls": REPLY["tool_calls"] * 2},
        with_arguments('{"city": "Oslo", "days": 3}'),
        with_arguments('{"city": "Oslo", "days": 2'),
    ],
)
def test_different_reply_is_not_recognized(sent: Any):
    assert named(sent) != named(REPLY)


def test_reply_without_text_is_recognized_by_its_calls():
    silent = {**REPLY, "content": ""}
    assert named({**silent, "content": None}) == named(silent)
    missing = {name: value for name, value in silent.items() if name != "content"}
    assert named(missing) == named(silent)


def test_lenient_reader_ignores_unsupported_options():
    body = {
        "model": "x",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "presence_penalty": 1,
        "some_option": 3,
    }
    text = json.dumps(body).encode()

    with pytest.raises(ApiError):
        ChatRequest.read(text)
    assert len(ChatRequest.read(text, lenient=True).tools) == 1
    with pytest.raises(ApiError, match="n must be a whole number"):
        ChatRequest.read(json.dumps({**body, "n": 0}).encode(), lenient=True)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_parts_that_are_no_texts_are_refused(kind: str):
    part = {"type": kind, kind: {"url": "data:image/png;base64,AA=="}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]
    with pytest.raises(ApiError, match=f"message 0 has a part of type '{kind}'. This server takes"):
        ChatRequest.read(json.dumps({"messages": messages}).encode())
