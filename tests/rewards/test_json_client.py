"""Service answers that do not end, come slowly, or grow when they are decompressed."""

import contextlib
import gzip
import json
import resource
import socketserver
import threading
import time

import pytest

from tests.rewards.batches import CharTokenizer, make_batch
from verl.config.reward import JudgeConfig, RequestsConfig
from verl.rewards.json_client import MAX_ANSWER_BYTES, JsonClient
from verl.rewards.managers import NaiveRewardManager
from verl.rewards.remote import Judge
from verl.utils.deadline import call_ends
from verl.utils.errors import RewardError

ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"


class Server(socketserver.ThreadingTCPServer):
    """Read one request a connection and answer it by calling `respond(send)`."""

    allow_reuse_address = True
    daemon_threads = True
    respond = staticmethod(lambda send: None)
    num_open = 0

    class RequestHandlerClass(socketserver.StreamRequestHandler):
        def handle(self):
            length = 0
            while line := self.rfile.readline().strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            self.rfile.read(length)
            self.server.num_open += 1
            with contextlib.suppress(OSError):  # the client hangs up
                self.server.respond(self.request.sendall)
            self.server.num_open -= 1

    def __init__(self):
        super().__init__(("127.0.0.1", 0), self.RequestHandlerClass)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def server():
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def make_client(server, timeout_s=60.0, max_retries=0):
    requests = RequestsConfig(timeout_s=timeout_s, max_retries=max_retries, backoff_s=0.01)
    return JsonClient(server.url, key="some.url", max_concurrent=1, requests=requests)


def wait_until(condition, seconds=60.0):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def flood(status):
    def respond(send):
        send(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
        while True:
            send(b'{"a": 1, ' * 100_000)

    return respond


def drip(start):
    def respond(send):
        send(start)
        while True:
            send(b" ")
            time.sleep(0.05)

    return respond


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_an_endless_answer_is_read_up_to_the_limit(server):
    server.respond = flood("200 OK")
    before = peak_bytes()
    with pytest.raises(RewardError, match="more than 16 MiB"):
        make_client(server).post("/", {})
    assert peak_bytes() - before < 6 * MAX_ANSWER_BYTES
    wait_until(lambda: server.num_open == 0)  # the connection is closed, not left to be read


def test_an_endless_error_is_not_read_before_a_retry(server):
    server.respond = flood("503 Busy")
    before = peak_bytes()
    with pytest.raises(RewardError, match="more than 16 MiB"):
        make_client(server, max_retries=3).post("/", {})
    assert peak_bytes() - before < 6 * MAX_ANSWER_BYTES
    wait_until(lambda: server.num_open == 0)


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nX-Slow: ", ENDLESS + b"{"])
def test_a_slow_answer_ends_with_the_time_out_of_a_request(server, start):
    server.respond = drip(start)
    with pytest.raises(RewardError, match="gave no answer") as raised:
        make_client(server, timeout_s=0.5).post("/", {})
    assert "HTTP" not in str(raised.value)  # no class of a connection or its pool
    wait_until(lambda: server.num_open == 0)


def test_a_compressed_answer_is_decompressed_up_to_the_limit(server):
    def answer(data):
        head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(data)}\r\n\r\n"
        server.respond = lambda send: send(head.encode() + data)

    answer(gzip.compress(json.dumps({"a": 1}).encode()))
    assert make_client(server).post("/", {}) == {"a": 1}

    bomb = gzip.compress(b" " * (4 * MAX_ANSWER_BYTES))
    assert len(bomb) < 100_000
    answer(bomb)
    with pytest.raises(RewardError, match="more than 16 MiB"):
        make_client(server).post("/", {})

    answer(b"this is not gzip")
    with pytest.raises(RewardError, match="gave no answer"):
        make_client(server).post("/", {})


@pytest.mark.parametrize("policy", ["zero", "drop"])
def test_no_thread_survives_the_deadline_of_its_call(server, policy):
    server.respond = drip(ENDLESS)
    before = set(threading.enumerate())  # other tests leave calls behind that only wait
    requests = RequestsConfig(timeout_s=600.0, max_retries=5, backoff_s=0.01)
    judge = Judge(JudgeConfig(url=server.url, model="m", max_concurrent=4), requests)
    manager = NaiveRewardManager(CharTokenizer(), 0, judge, timeout_s=0.5, on_error=policy)
    result = manager(make_batch(["a"] * 4), return_dict=True)
    assert sum(result["metrics"].values()) == 4

    def left() -> list[threading.Thread]:
        new = set(threading.enumerate()) - before
        return [thread for thread in new if thread.name == "verl-reward"]

    wait_until(lambda: not left())
    wait_until(lambda: server.num_open == 0)


def test_json_nested_too_deeply_is_no_answer(server):
    data = b"[" * 1_000_000
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    server.respond = lambda send: send(head + data)
    with pytest.raises(RewardError, match="did not answer a JSON object"):
        make_client(server).post("/", {})


def test_a_service_that_drops_connections_is_named_before_the_deadline(server):
    requests = RequestsConfig(timeout_s=60.0, max_retries=5, backoff_s=300.0)
    client = JsonClient(server.url, key="some.url", max_concurrent=1, requests=requests)
    token = call_ends.set(time.monotonic() + 40)
    began = time.monotonic()
    message = (
        r"the service did not answer \(\w+: .*\), and the next attempt, in .* after the deadline"
    )
    try:
        with pytest.raises(RewardError, match=message):
            client.post("/", {})
    finally:
        call_ends.reset(token)
    assert time.monotonic() - began < 30
