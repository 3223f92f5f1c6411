"""`verl serve`: from the command line to answers and shutdown."""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.launches import free_port, launch
from verl.config.load import load_config
from verl.jobs import serve
from verl.jobs.main_serve import main, with_model_key
from verl.jobs.serve import build_backend, build_server

pytestmark = pytest.mark.timeout(180)

TOY = ["model.path=toy", "trainer.num_threads=1", "server.port=0", "rollout.max_num_seqs=8"]
QUESTION: Any = [{"role": "user", "content": "2 + 5 = ?"}]
# Tool calls in Hermes format, as the templates of Qwen 2.5 show them.
TOOL_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "<tool_call></tool_call>{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def served(argv: list[str], ask: Any) -> Any:
    """Return the result of `ask(client)` with a client of the server that the keys describe."""
    config = load_config([*TOY, *argv], root="serve")

    async def all_of_it():
        backend = build_backend(config)
        async with build_server(config, backend) as server:
            url = f"{server.url}/v1"
            key = backend.api_key
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                return await ask(client)

    return asyncio.run(all_of_it())


async def chat(client: openai.AsyncOpenAI, **options: Any) -> Any:
    asked = {"model": "toy", "messages": QUESTION, "max_tokens": 8, **options}
    return (await client.chat.completions.create(**asked)).choices[0]


def test_the_toy_model_answers():
    async def ask(client):
        return await chat(client, temperature=0), await chat(client, temperature=0)

    first, second = served([], ask)
    assert first.message.content == second.message.content
    assert first.message.content


def test_a_request_without_settings_uses_those_of_the_keys():
    async def ask(client):
        return [(await chat(client)).message.content for _ in range(4)]

    greedy = served(["rollout.temperature=0"], ask)
    assert len(set(greedy)) == 1
    assert len(set(served(["rollout.temperature=3"], ask))) > 1


def test_the_model_name_and_the_api_key_of_the_configuration(monkeypatch):
    monkeypatch.setenv("SERVE_KEY", "sk-mine")

    async def ask(client):
        assert client.api_key == "sk-mine"
        return [each.id async for each in client.models.list()]

    assert served(["server.api_key_env=SERVE_KEY", "server.model_name=mine"], ask) == ["mine"]


def test_a_template_with_tools_enables_tools(tmp_path: Path):
    template = tmp_path / "chat.jinja"
    template.write_text(TOOL_TEMPLATE)
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

    async def ask(client):
        return await chat(client, tools=[tool])

    with pytest.raises(openai.BadRequestError, match="format of tool calls is not known"):
        served([], ask)
    answer = served([f"model.custom_chat_template={template}"], ask)
    assert answer.finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "model.path is not set"),
        (["toy", "server.tool_format=hermis"], "server.tool_format must be the name"),
        (["toy", "server.api_key_env=ABSENT"], "the environment variable 'ABSENT' is not set"),
        (["toy", "rollout.max_model_len=5000"], "has 1024 positions"),
        (["toy", "rollout.temprature=1"], "Unknown key 'rollout.temprature'"),
        (["absent/folder/model"], "Expected a model folder at 'absent/folder/model'"),
    ],
)
def test_unservable_settings_are_reported_in_one_line(capsys, argv: list[str], says: str):
    assert main([*argv, "server.port=0", "trainer.num_threads=1"]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_a_host_of_another_machine_is_reported_before_the_model_loads(
    capsys, monkeypatch, host: str
):
    monkeypatch.setattr(serve, "build_backend", lambda _: pytest.fail("the model was loaded"))
    assert main(["toy", f"server.host={host}", "server.port=0"]) == 1
    written = capsys.readouterr().err
    assert f"Cannot listen on {host}:0: " in written
    assert "The host must be a name or an address of this machine" in written


def test_a_port_in_use_is_reported_before_the_model_loads(capsys, monkeypatch):
    monkeypatch.setattr(serve, "build_backend", lambda _: pytest.fail("the model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["toy", f"server.port={port}"]) == 1
    written = capsys.readouterr().err
    assert f"Cannot listen on 127.0.0.1:{port}: " in written
    assert "Choose another port, or 0 for a free one." in written


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["toy", "a=1"], ["model.path='toy'", "a=1"]),
        (["it's/here", "a=1"], [r"model.path='it\'s/here'", "a=1"]),
        (["model.path=toy"], ["model.path=toy"]),
        (["--cfg", "job"], ["--cfg", "job"]),
        (["run.yaml"], ["run.yaml"]),
        ([], []),
    ],
)
def test_the_model_may_come_first(argv: list[str], expected: list[str]):
    assert with_model_key(argv) == expected


def test_a_path_with_special_characters_is_used_verbatim():
    path = "models/it's [new], b\\c"
    assert load_config(with_model_key([path]), root="serve").model.path == path


def test_other_machines_can_connect_only_if_configured(caplog):
    assert load_config(["model.path=toy"], root="serve").server.host == "127.0.0.1"
    load_config(["model.path=toy", "server.host=0.0.0.0"], root="serve")
    assert "without encryption" in caplog.text


def test_without_its_package_the_command_names_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert main(["toy"]) == 1
    assert capsys.readouterr().err.endswith("Install it: pip install 'verl[serve]'\n")


def serve_until_interrupted(port: int) -> int:
    """Serve, ask once from a thread, and interrupt this process. Returns the exit code."""
    url = f"http://127.0.0.1:{port}"

    def ask() -> None:
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health"):
                    break
            except OSError:
                time.sleep(0.05)

        body = {"model": "toy", "messages": QUESTION, "max_tokens": 4}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Authorization": "Bearer sk-mine"},
        )
        with urllib.request.urlopen(request) as answer:
            print("answer:", json.load(answer)["choices"][0]["message"]["role"], flush=True)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=ask, daemon=True).start()
    os.environ["SERVE_KEY"] = "sk-mine"
    return main(["toy", f"server.port={port}", "server.api_key_env=SERVE_KEY", *TOY[1:2]])


def test_an_interrupt_ends_the_server(tmp_path: Path):
    done = launch(1, serve_until_interrupted, free_port(), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "answer: assistant" in done.stdout
    assert "Serving toy at http://127.0.0.1:" in done.stdout
    assert "sk-mine" not in done.stdout, "only a key that was made here is shown"
    assert "Answered 1 requests with" in done.stdout + done.stderr
