"""Clients that hang up within a request: no failure of the server, which goes on."""

import asyncio
import json
import logging
import socket
import time
from functools import partial

import pytest

from tests.agents.gateway.stand_ins import KEY, served
from tests.tiny_models import tiny_model
from verl.agents.tools.threads import run_to_end


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen2")


def request(body: bytes, length: int) -> bytes:
    """Write a POST of a completion that announces `length` bytes of body."""
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {length}\r\n\r\n"
    )
    return head.encode() + body


def hang_up(port: int, sent: bytes, *, after_answer: bool) -> None:
    """Send bytes, and close the connection soon or when the answer begins.

    In a thread, so that the server may be writing at this moment.
    """
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(sent)
        if after_answer:
            connection.recv(10)
        else:
            time.sleep(0.02)


@pytest.mark.parametrize("when", ["within the body", "within the stream"])
def test_a_client_that_hangs_up_is_no_failure_of_the_server(model, caplog, when: str):
    is_stream = when == "within the stream"
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "stream": is_stream}
    written = json.dumps(body).encode()
    sent = request(written, len(written))
    if not is_stream:
        sent = request(written[:5], len(written))

    async def ask():
        async with served(model) as (server, client):
            call = partial(hang_up, server.port, sent, after_answer=is_stream)
            await asyncio.gather(*(asyncio.to_thread(call) for _ in range(8)))
            await asyncio.sleep(0.1)
            answer = await client.completions.create(model="tiny", prompt="abc", max_tokens=2)
            assert answer.usage is not None
            return answer.usage.completion_tokens

    with caplog.at_level(logging.WARNING):
        assert 1 <= run_to_end(ask()) <= 2
    assert "failed on a request" not in caplog.text
    assert "Traceback" not in caplog.text


def test_an_error_within_a_loop_has_no_foreign_context():
    async def fail():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as failure:
        run_to_end(fail())
    assert failure.value.__context__ is None
