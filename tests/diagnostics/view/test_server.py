"""The server of `verl view` answers its own page alone."""

import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.diagnostics.view.toy_records import HOSTILE, write_record
from verl.cli.main import main
from verl.diagnostics.view.answers import Answers
from verl.diagnostics.view.notebook import load_run
from verl.diagnostics.view.server import ViewServer
from verl.utils.errors import ConfigError, DataError


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ViewServer]:
    write_record(tmp_path / "run", texts=[HOSTILE])
    server = ViewServer(Answers([load_run(tmp_path / "run")]))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def get(server: ViewServer, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    return reply.status, body, dict(reply.getheaders())


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/sample/0/1/0", "/x"])
def test_without_the_token_there_is_nothing(server: ViewServer, path: str):
    for headers in ({}, {"X-Verl-Token": "wrong"}, {"X-Verl-Token": server.token[:-1]}):
        status, body, _ = get(server, path, **headers)
        assert (status, b"hacked" in body) == (403, False)


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "evil.example:80"}],
)
def test_other_origins_and_rebound_names_get_nothing(server: ViewServer, headers: dict[str, str]):
    status, body, _ = get(server, "/api/runs", **{"X-Verl-Token": server.token, **headers})
    assert status == 403
    assert server.token.encode() not in body


def test_the_page_and_its_answers_forbid_everything_foreign(server: ViewServer):
    address = urlsplit(server.url)
    assert parse_qs(address.query)["token"] == [server.token]
    status, page, headers = get(server, f"/?{address.query}")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert b"http://" not in page.replace(b"http://www.w3.org/2000/svg", b"")
    assert b"https://" not in page

    status, body, headers = get(server, "/api/samples/0/1", **{"X-Verl-Token": server.token})
    assert status == 200
    assert headers["X-Content-Type-Options"] == "nosniff"
    columns = json.loads(body)["columns"]
    assert columns["response"][0] == HOSTILE
    assert columns["flat"] == [True] * 4 + [False] * 4
    assert columns["score"][4:] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "question",
    ["", "runs/1", "sample/0/1", "sample/0/1/99", "samples/9/1", "samples/0/77", "a/../b"],
)
def test_questions_without_sense_are_refused(server: ViewServer, question: str):
    with pytest.raises(DataError):
        server.answers.answer(question)
    assert get(server, f"/api/{question}", **{"X-Verl-Token": server.token})[0] == 404


def wait_for_requests() -> None:
    """Wait until the server has ended every request."""
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(10)


def test_a_browser_that_leaves_prints_no_traceback(server: ViewServer, capsys):
    request = (
        f"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n"
        f"X-Verl-Token: {server.token}\r\n\r\n"
    )
    with server.answers._lock:  # no answer until the browser has left
        connection = socket.create_connection(("127.0.0.1", server.server_port))
        connection.sendall(request.encode())
        time.sleep(0.2)
        # Without lingering, closing resets the connection.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    wait_for_requests()
    assert capsys.readouterr().err == ""


def test_another_error_of_a_request_is_printed(server: ViewServer, monkeypatch, capsys):
    def fail(question: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(server.answers, "answer", fail)
    with pytest.raises(http.client.RemoteDisconnected):
        get(server, "/api/runs", **{"X-Verl-Token": server.token})
    wait_for_requests()
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("port", [99999, 65536, -1])
def test_a_port_out_of_range_is_an_error_of_one_line(tmp_path: Path, capsys, port: int):
    write_record(tmp_path)
    assert main(["view", str(tmp_path), f"--port={port}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"ConfigError: Expected a port from 0 to 65535, got {port}.")
    assert len(error.splitlines()) == 1


def test_a_folder_is_no_file_for_an_export(tmp_path: Path, capsys):
    write_record(tmp_path / "run", steps=1)
    assert main(["view", str(tmp_path / "run"), "--export", str(tmp_path)]) == 1
    written = capsys.readouterr().err
    assert f"--export must name a file, got the folder '{tmp_path}'" in written
    assert f"Write {tmp_path}/run.html." in written


def test_a_port_in_use_is_named(server: ViewServer):
    with pytest.raises(ConfigError, match=f"Port {server.server_port} cannot be used"):
        ViewServer(server.answers, server.server_port)
