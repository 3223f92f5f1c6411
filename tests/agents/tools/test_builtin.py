import asyncio
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.agents.tools.user_tools import one, tool_set
from verl.agents.tools.builtin.answer_check import Geo3kTool, Gsm8kTool
from verl.agents.tools.builtin.code import CodeInterpreterTool, SandboxFusionTool
from verl.agents.tools.builtin.search import BACKOFF_S, SearchTool
from verl.agents.tools.local_retriever import BM25, Retriever, read_corpus
from verl.agents.tools.rate_limit import RateLimit
from verl.utils.errors import ConfigError, DataError


def results_of(tool, *calls, row=None, **settings):
    """Make calls of one tool; return their results, the rewards and the counts."""

    async def run():
        tools = tool_set(tool, **{"timeout_s": 30.0, **settings})
        session = await tools.open("test", row)
        results = []
        for turn, arguments in enumerate(calls):
            results.append(await one(session, tool.name, turn=turn, **arguments))
        rewards = await session.finish()
        await tools.aclose()
        return results, rewards, tools.counts()

    return asyncio.run(run())


def truth_of(tool, value):
    return {tool.name: {"create_kwargs": {"ground_truth": value}}}


def test_gsm8k_penalizes_an_answer_without_progress():
    tool = Gsm8kTool({}, None)
    answers = [{"answer": "71"}, {"answer": "#### 72"}, {"answer": "72"}]
    results, rewards, _ = results_of(tool, *answers, row=truth_of(tool, "72"))
    texts = [result.text for result in results]
    assert texts == [
        "Current parsed answer='71' reward=0.0",
        "Current parsed answer='#### 72' reward=1.0",
        "Current parsed answer='72' reward=1.0",
    ]
    assert [result.reward for result in results] == [-0.05, 0.0, -0.05]
    assert rewards == {"calc_gsm8k_reward": 1.0}


def test_gsm8k_reads_create_kwargs_in_both_ways():
    async def run():
        tool = Gsm8kTool({}, None)
        await tool.create("old", ground_truth="72")
        await tool.create("new", create_kwargs={"ground_truth": "72"})
        for name in ("old", "new"):
            await tool.execute(name, {"answer": "72"})
        return [await tool.calc_reward(name) for name in ("old", "new")]

    assert asyncio.run(run()) == [1.0, 1.0]


def test_a_row_without_ground_truth_is_an_error_of_the_call():
    (result,), rewards, _ = results_of(Gsm8kTool({}, None), {"answer": "1"})
    assert result.outcome == "error"
    assert "create_kwargs.ground_truth" in result.text
    assert rewards == {}


def test_a_missing_argument_is_the_models_mistake():
    tool = Gsm8kTool({}, None)
    (result,), _, _ = results_of(tool, {"result": 3}, row=truth_of(tool, "72"))
    assert result.outcome == "malformed"
    assert "needs the argument 'answer'" in result.text


def test_geo3k_compares_expressions():
    tool = Geo3kTool({}, None)
    answers = [{"answer": "2\\sqrt{2}"}, {"answer": "\\boxed{\\sqrt{8}}"}]
    results, rewards, _ = results_of(tool, *answers, row=truth_of(tool, "\\sqrt{8}"))
    assert [result.text.endswith("reward=1.0") for result in results] == [True, True]
    assert rewards == {"calc_geo3k_reward": 1.0}


CORPUS = [
    {"contents": "Paris\nParis is the capital of France."},
    {"contents": "Berlin\nBerlin is the capital of Germany."},
    {"contents": "Rhine\nThe Rhine is a river in Germany and France."},
]


@pytest.fixture
def retriever():
    with Retriever(CORPUS) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def test_search_finds_documents(retriever):
    tool = SearchTool({"retrieval_service_url": retriever.url, "topk": 1}, None)
    queries = {"query_list": ["capital of Germany", "a river"]}
    (result,), rewards, _ = results_of(tool, queries)
    assert json.loads(result.text)["result"] == (
        "Doc 1 (Title: Berlin)\nBerlin is the capital of Germany.\n---\n"
        "Doc 1 (Title: Rhine)\nThe Rhine is a river in Germany and France."
    )
    assert result.metrics == {"query_count": 2, "total_results": 2}
    assert rewards == {}


def test_search_needs_queries(retriever):
    tool = SearchTool({"retrieval_service_url": retriever.url}, None)
    results, _, _ = results_of(tool, {}, {"query_list": []}, {"query_list": "river"})
    assert [result.outcome for result in results] == ["malformed", "malformed", "ok"]


@pytest.fixture
def service():
    """Start a service that answers with (status, body) from `answers`, and keeps the requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.requests.append((self.path, json.loads(body)))
            server.times.append(time.monotonic())
            with server.lock:
                server.under_way += 1
                server.most_under_way = max(server.most_under_way, server.under_way)
                status, answer = server.answers.pop(0)
            time.sleep(server.delay_s)
            with server.lock:  # before the answer, after which the client may send the next
                server.under_way -= 1
            data = json.dumps(answer).encode()
            self.send_response(status)
            for name, value in server.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    class Service(ThreadingHTTPServer):
        requests: list
        times: list
        answers: list
        headers: dict
        lock = threading.Lock()
        delay_s = 0.0
        under_way = most_under_way = 0

    with Service(("127.0.0.1", 0), Handler) as server:
        server.requests, server.times, server.answers, server.headers = [], [], [], {}
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def url_of(service, path=""):
    return f"http://127.0.0.1:{service.server_port}{path}"


def test_search_tries_again_while_the_service_is_down(service):
    service.answers += [(503, {}), (500, {}), (200, {"result": [[]]})]
    tool = SearchTool({"retrieval_service_url": url_of(service, "/retrieve")}, None)
    (result,), _, _ = results_of(tool, {"query_list": ["a"]})
    assert json.loads(result.text) == {"result": ""}
    assert (
        service.requests
        == [("/retrieve", {"queries": ["a"], "topk": 3, "return_scores": True})] * 3
    )


def test_a_search_waits_as_long_as_a_busy_service_asks(service):
    service.answers += [(429, {}), (200, {"result": [[]]})]
    service.headers["Retry-After"] = "1"
    tool = SearchTool({"retrieval_service_url": url_of(service)}, None)
    before = time.monotonic()
    (result,), _, _ = results_of(tool, {"query_list": ["a"]})
    assert result.outcome == "ok"
    assert time.monotonic() - before >= 1.0


def test_a_busy_service_without_retry_after_is_not_asked_again_at_once(service):
    service.answers += [(429, {}), (200, {"result": [[]]})]
    tool = SearchTool({"retrieval_service_url": url_of(service)}, None)
    (result,), _, _ = results_of(tool, {"query_list": ["a"]})
    first, second = service.times
    assert result.outcome == "ok"
    assert second - first >= BACKOFF_S


def test_the_limit_on_requests_a_second_counts_retries(service, monkeypatch):
    monkeypatch.setattr("verl.agents.tools.builtin.search.BACKOFF_S", 0.0)
    service.answers += [(503, {}), (503, {}), (200, {"result": [[]]})]
    tool = SearchTool({"retrieval_service_url": url_of(service), "requests_per_s": 10}, None)
    before = time.monotonic()
    (result,), _, _ = results_of(tool, {"query_list": ["a"]})
    _, _, third = service.times
    assert result.outcome == "ok"
    assert third - before >= 0.2


def test_a_search_that_has_no_time_for_another_try_names_the_answer(service):
    service.answers += [(429, {})]
    service.headers["Retry-After"] = "60"
    tool = SearchTool({"retrieval_service_url": url_of(service)}, None)
    before = time.monotonic()
    (result,), _, _ = results_of(tool, {"query_list": ["a"]}, timeout_s=20.0)
    assert time.monotonic() - before < 15
    assert result.outcome == "error"
    assert "the service answered 429, and the next attempt, in 30.0 s," in result.text


def test_searches_beyond_the_limit_wait_for_their_turn(service):
    service.answers += [(200, {"result": [[]]})] * 6
    service.delay_s = 0.1
    config = {"retrieval_service_url": url_of(service), "num_workers": 120, "rate_limit": 2}

    async def run():
        tools = tool_set(SearchTool(config, None), timeout_s=30.0)
        sessions = [await tools.open(f"episode {number}") for number in range(6)]
        results = await asyncio.gather(
            *(one(session, "search", query_list=["a"]) for session in sessions)
        )
        await tools.aclose()
        return results

    results = asyncio.run(run())
    assert [result.outcome for result in results] == ["ok"] * 6
    assert service.most_under_way == 2


def test_a_search_that_fails_is_an_error(service):
    service.answers += [(400, {"error": "no"}), (200, {"documents": []}), (200, {"result": []})]
    tool = SearchTool({"retrieval_service_url": url_of(service)}, None)
    results, _, _ = results_of(tool, *[{"query_list": ["a"]}] * 3)
    assert [result.outcome for result in results] == ["error", "error", "error"]
    assert "0 lists of documents for 1 queries" in results[2].text
    assert "answered 400" in results[0].text
    assert "no list of documents" in results[1].text


def test_the_sandbox_runs_a_program():
    tool = CodeInterpreterTool({"run_timeout_s": 1}, None)
    results, _, _ = results_of(
        tool,
        {"code": "print(6 * 7)"},
        {"code": "```python\nimport sys\nprint(repr(sys.stdin.read()))\n```"},
        {"code": "print(1)\ndef f():\n    return 1 / 0\nf()"},
        {"code": "print(2)\nwhile True: pass"},
        {"code": "print(3); raise SystemExit('bye')"},
        {"code": "1 +"},
        {"code": "   "},
        max_tool_response_length=None,
    )
    texts = [result.text for result in results]

    assert texts[:2] == ["42\n", "''\n"]
    assert texts[2].startswith('1\nTraceback (most recent call last):\n  File "program.py", line 4')
    assert texts[2].endswith("ZeroDivisionError: division by zero")
    assert texts[3] == "2\nThe program was stopped after 1 s."
    assert texts[4] == "3\nbye"
    assert "SyntaxError" in texts[5]
    assert "verl" not in texts[2] + texts[5]
    assert [result.outcome for result in results] == ["ok"] * 6 + ["malformed"]
    assert [result.metrics.get("status") for result in results[2:4]] == ["failed", "timeout"]


def test_sandbox_fusion_runs_a_program(service):
    run = {"status": "Finished", "stdout": "42\n", "stderr": "warned\n", "return_code": 0}
    late = {"status": "TimeLimitExceeded", "stdout": "", "stderr": ""}
    service.answers += [
        (200, {"status": "Success", "run_result": run}),
        (200, {"status": "Failed", "run_result": late}),
        (200, {"status": "SandboxError", "message": "full"}),
    ]
    config = {"sandbox_fusion_url": url_of(service, "/run_code"), "default_timeout": 5}
    code = {"code": "print(42)"}
    results, _, _ = results_of(SandboxFusionTool(config, None), code, code, code)
    assert results[0].text == "42\nwarned\n"
    assert results[1].text == "The program was stopped after 5 s."
    assert results[2].outcome == "error"

    path, body = service.requests[0]
    assert path == "/run_code"
    assert (body["code"], body["language"], body["run_timeout"]) == ("print(42)", "python", 5.0)


class PrintsLast(SandboxFusionTool):
    """ReTool's tool: it prints the last line, and runs the program by the pool of its base."""

    async def execute(self, instance_id, parameters, **kwargs):
        code = f"print({parameters['code']})"
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        result = await self.execution_pool.execute.remote(
            self.execute_code, instance_id, code, timeout, language
        )
        return result, None, None


def test_a_sandbox_tool_of_a_recipe_runs(service):
    run = {"status": "Finished", "stdout": "42\n", "stderr": ""}
    service.answers += [(200, {"status": "Success", "run_result": run})]
    config = {"sandbox_fusion_url": url_of(service, "/run_code"), "default_timeout": 5}
    results, _, _ = results_of(PrintsLast(config, None), {"code": "6 * 7", "timeout": 99})
    assert (results[0].text, results[0].reward) == ("42\n", None)
    _, body = service.requests[0]
    assert (body["code"], body["run_timeout"]) == ("print(6 * 7)", 5.0)


@pytest.mark.parametrize(
    ("tool_class", "key"),
    [(SearchTool, "retrieval_service_url"), (SandboxFusionTool, "sandbox_fusion_url")],
)
def test_service_tools_need_an_address(tool_class, key):
    with pytest.raises(ConfigError, match=key):
        tool_class({}, None)
    with pytest.raises(ConfigError, match=key):
        tool_class({key: "nowhere"}, None)


def test_bm25_prefers_rare_words_and_short_documents():
    index = BM25(["the cat", "the dog and the cat and the bird", "the dog"])
    assert [number for number, _ in index.search("the bird", 3)] == [1, 0, 2]
    assert [number for number, _ in index.search("cat", 3)] == [0, 1]
    assert index.search("fish", 3) == []


def test_the_corpus_may_have_titles_and_wrong_lines_are_named(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"title": "A", "text": "b", "id": 1}\n\n{"contents": "C\\nd"}\n')
    documents = read_corpus(path)
    assert [document["contents"] for document in documents] == ["A\nb", "C\nd"]
    path.write_text('{"contents": "a"}\n{"body": "b"}\n')
    with pytest.raises(DataError, match="line 2"):
        read_corpus(path)


def test_the_retriever_runs_as_a_program(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(document) for document in CORPUS))
    command = [sys.executable, "-m", "verl.agents.tools.local_retriever", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        line = program.stdout.readline()
        tool = SearchTool({"retrieval_service_url": line.split()[-1], "topk": 1}, None)
        (result,), _, _ = results_of(tool, {"query_list": ["rhine"]})
        program.kill()
    assert line.startswith("3 documents at http://127.0.0.1:")
    assert "The Rhine is a river" in result.text


def test_a_rate_limit_spaces_calls_evenly():
    limit = RateLimit(10)
    waits = [limit.reserve() for _ in range(4)]
    assert waits == pytest.approx([0.0, 0.1, 0.2, 0.3], abs=0.02)
    assert [RateLimit(None).reserve() for _ in range(2)] == [0.0, 0.0]
