"""Services over HTTP: a sandbox and a judge, simulated by a small server in a thread."""

import json
import pickle
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rewards.batches import CharTokenizer, make_batch
from verl.compat.score import default_compute_score
from verl.config.load import config_from_dict
from verl.config.reward import JudgeConfig, RequestsConfig, SandboxFusionConfig
from verl.rewards import build
from verl.rewards.build import build_code_runner, build_reward, build_reward_function
from verl.rewards.managers import NaiveRewardManager
from verl.rewards.remote import JsonClient, Judge, SandboxService
from verl.rewards.rules import with_options
from verl.utils.errors import ConfigError, RewardError

FAST = RequestsConfig(timeout_s=2.0, max_retries=3, backoff_s=0.01)


class QuietServer(ThreadingHTTPServer):
    """Ignore clients that disconnect: a report would be printed into a later test."""

    def handle_error(self, request: object, client_address: object) -> None: ...


class Service:
    """Answer POSTs with `respond(body)`: (status, headers, JSON), after `delay_s`."""

    def __init__(self, respond) -> None:
        self.respond = respond
        self.requests: list[tuple[str, dict[str, str], Any, float]] = []
        self.delay_s = 0.0
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with service._lock:
                    service.at_once += 1
                    service.most_at_once = max(service.most_at_once, service.at_once)
                    service.requests.append((self.path, dict(self.headers), body, time.monotonic()))

                time.sleep(service.delay_s)
                status, headers, answer = service.respond(body)
                with service._lock:
                    service.at_once -= 1
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)

                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format, *args):
                """Suppress lines on stderr."""

        self.server = QuietServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()


@pytest.fixture
def serve():
    started = []

    def start(respond) -> Service:
        started.append(Service(respond))
        return started[-1]

    yield start
    for service in started:
        service.server.shutdown()
        service.server.server_close()


def says(text: str):
    return lambda body: (
        200,
        {},
        {"choices": [{"message": {"role": "assistant", "content": text}}]},
    )


def cut(text: str | None):
    message = {"role": "assistant", "content": text}
    return lambda body: (200, {}, {"choices": [{"message": message, "finish_reason": "length"}]})


def in_turn(*answers):
    left = list(answers)
    return lambda body: left.pop(0)(body) if len(left) > 1 else left[0](body)


def status(number: int, **headers: str):
    return lambda body: (
        number,
        {name.replace("_", "-"): value for name, value in headers.items()},
        {"error": "no"},
    )


def make_judge(url: str, requests: RequestsConfig = FAST, **changes: Any) -> Judge:
    return Judge(
        JudgeConfig(**{"url": url, "model": "judge-7b", "max_tokens": 64, **changes}), requests
    )


@pytest.mark.parametrize(
    ("text", "score"),
    [("Score: 7,5", 0.75), ("Score: 7, since it is right.", 0.7), ("Score: 7,\n5", 0.7)],
)
def test_a_judge_may_write_a_comma(serve, text: str, score: float):
    judge = make_judge(serve(says(text)).url)
    assert judge("poem", "four", "{it} is 4")["score"] == score


def test_a_judge_reads_the_response_and_its_last_score_counts(serve, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-1")
    service = serve(says("Score: 3? No.\nScore: 7.5"))
    judge = make_judge(service.url + "/v1/", api_key_env="JUDGE_KEY")
    result = NaiveRewardManager(CharTokenizer(), 0, judge)(
        make_batch(["{it} is 4"], ["four"], extra_infos=[{"question": "2 + 2?"}]), return_dict=True
    )
    assert result["reward_tensor"].sum() == 0.75
    assert result["reward_extra_info"]["judge_answer"] == ["Score: 3? No.\nScore: 7.5"]
    path, headers, body, _ = service.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer sk-1"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge-7b", 0.0, 64)
    (message,) = body["messages"]
    assert all(part in message["content"] for part in ("2 + 2?", "four", "{it} is 4"))


def test_own_prompt_pattern_and_scale(serve):
    service = serve(says('{"grade": 4}'))
    judge = make_judge(
        service.url,
        prompt='Grade "{response}" as {{"grade": n}}',
        score_pattern=r'"grade": (\d)',
        score_scale=4.0,
    )
    assert judge("s", "text", None)["score"] == 1.0
    assert service.requests[0][2]["messages"][0]["content"] == 'Grade "text" as {"grade": n}'
    assert pickle.loads(pickle.dumps(judge))("s", "text", None)["score"] == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "no place for it"}, "the last always"),
        ({"prompt": "{response} {answer}"}, r"got \['answer', 'response'\]"),
        ({"prompt": "{response} {"}, "braces of its own"),
        ({"score_pattern": "("}, "not a regular expression"),
        ({"score_pattern": r"\d+"}, "one group"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "no such environment variable"),
        ({"url": "localhost:80"}, "must be an address"),
        ({"url": "http://host:99999"}, "must be an address"),
    ],
)
def test_a_judge_that_cannot_work_is_reported_at_start(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_judge(**{"url": "http://127.0.0.1:1", **changes})


@pytest.mark.parametrize("number", [429, 500, 503])
def test_a_busy_service_is_retried(serve, number):
    service = serve(in_turn(status(number), status(number), says("Score: 10")))
    assert make_judge(service.url)("s", "x", None)["score"] == 1.0
    assert len(service.requests) == 3


def test_retry_after_is_respected(serve):
    service = serve(in_turn(status(429, Retry_After="1"), says("Score: 10")))
    assert make_judge(service.url)("s", "x", None)["score"] == 1.0
    (_, _, _, first), (_, _, _, second) = service.requests
    assert second - first >= 1.0


def test_an_invalid_or_excessive_retry_after(serve):
    for wait in ("0.01", "100000"):
        service = serve(in_turn(status(429, Retry_After=wait), says("Score: 10")))
        requests = RequestsConfig(timeout_s=2.0, max_retries=3, backoff_s=0.01)
        client = JsonClient(
            service.url, key="reward_model.judge.url", max_concurrent=1, requests=requests
        )
        assert client.post("/", {}) is not None


def test_permanent_errors_are_not_retried(serve):
    service = serve(status(401))
    with pytest.raises(RewardError, match=r"reward_model\.judge\.url\) answered 401"):
        make_judge(service.url)("s", "x", None)
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("number", "path", "variable", "advice"),
    [
        (401, "/v1", None, r"Set reward_model\.judge\.api_key_env to the environment variable"),
        (403, "/v1", "JUDGE_KEY", r"key in the environment variable JUDGE_KEY \(reward_model\."),
        (404, "", None, r"set reward_model\.judge\.url=http://[\d.:]+/v1"),
        (404, "/v1/chat/completions", None, r"Correct reward_model\.judge\.url or .*judge\.model"),
    ],
)
def test_a_refusal_names_the_key_to_change(
    serve, monkeypatch: pytest.MonkeyPatch, number, path, variable, advice
):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge = make_judge(serve(status(number)).url + path, api_key_env=variable)
    with pytest.raises(RewardError, match=rf"answered {number}: .*{advice}"):
        judge("s", "x", None)


@pytest.mark.parametrize(
    ("respond", "message"),
    [
        (status(503), "answered 503"),
        (says("no number"), r"in the form of .*score_pattern \(Score.* got 'no number'. Ask for"),
        (cut("Well,"), r"got 'Well,'. It was cut: raise reward_model.judge.max_tokens=64"),
        (cut(None), r"got ''. It was cut: raise reward_model.judge.max_tokens=64"),
        (lambda body: (200, {}, {"choices": []}), "no choices"),
        (lambda body: (200, {}, b"<html>"), "did not answer a JSON object"),
    ],
)
def test_answers_without_a_score(serve, respond, message):
    with pytest.raises(RewardError, match=message):
        make_judge(serve(respond).url)("s", "x", None)


@pytest.mark.parametrize(("number", "tries"), [(400, 1), (429, 4), (502, 4)])
def test_a_refusal_of_the_judge_follows_the_policy(serve, number, tries, caplog):
    service = serve(
        lambda body: says("Score: 10")(body) if "fine" in str(body) else status(number)(body)
    )
    judge = make_judge(service.url)
    batch = make_batch(["fine", "bad", "fine"])
    result = NaiveRewardManager(CharTokenizer(), 0, judge, on_error="drop")(batch, return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 0.0, 1.0]
    assert result["dropped"] == [1]

    assert result["metrics"] == {"reward/num_errors": 1, "reward/num_timeouts": 0}
    assert len(service.requests) == 2 + tries
    assert f"answered {number}" in caplog.text

    with pytest.raises(
        RewardError,
        match=rf"response 1 of the batch(?s:.)*reward_model\.judge\.url\) answered {number}",
    ):
        NaiveRewardManager(CharTokenizer(), 0, judge)(batch)


def test_a_silent_service_is_abandoned_and_a_slow_one_is_not_flooded(serve):
    slow = serve(says("Score: 10"))
    slow.delay_s = 0.15
    judge = make_judge(slow.url, max_concurrent=4)
    assert NaiveRewardManager(CharTokenizer(), 0, judge)(make_batch(["x"] * 16)).sum() == 16
    assert slow.most_at_once == 4
    slow.delay_s = 2.0
    impatient = make_judge(slow.url, RequestsConfig(timeout_s=0.2, max_retries=1, backoff_s=0.01))
    with pytest.raises(RewardError, match="gave no answer"):
        impatient("s", "x", None)


def test_connections_never_exceed_the_limit_for_any_number_of_threads(serve):
    service = serve(says("Score: 1"))
    service.delay_s = 0.02
    judge = make_judge(service.url, max_concurrent=2)
    threads = [threading.Thread(target=judge, args=("s", "x", None)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert service.most_at_once == 2
    assert len(service.requests) == 12


# ---------------------------------------------------------------- the sandbox service


def run_code(body: dict[str, Any]):
    """Answer like run_code of SandboxFusion, with the program run here."""
    import contextlib
    import io

    output = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(output):
        try:
            exec(
                body["code"],
                {"input": iter(body["stdin"].splitlines()).__next__, "__name__": "__main__"},
            )
        except SystemExit as error:
            code = int(error.code or 0)
        except Exception:  # noqa: BLE001  (as the service does)
            code = 1
    result = {
        "status": "Finished",
        "return_code": code,
        "stdout": output.getvalue(),
        "stderr": "",
        "execution_time": 0.1,
    }
    return 200, {}, {"status": "Success" if code == 0 else "Failed", "run_result": result}


def make_service(url: str) -> SandboxService:
    return SandboxService(SandboxFusionConfig(url=url, memory_limit_mb=256), 4.0, FAST)


MBPP = {"test_list": ["assert f(1) == 2", "assert f(2) == 3"], "test_setup_code": ""}


def test_code_runs_in_the_service(serve):
    service = serve(run_code)
    for url in (service.url, service.url + "/run_code"):
        score = with_options({}, make_service(url))
        assert (
            score("mbpp", "def f(x):\n    print('noise passed')\n    return x + 1", MBPP)["score"]
            == 1.0
        )
        assert score("mbpp", "def f(x):\n    return 2", MBPP) == {
            "score": 0.0,
            "passed": 0.5,
            "timed_out": 0.0,
        }
        assert score("mbpp", "def f(x) return", MBPP)["score"] == 0.0
        assert score("mbpp", "def f(x):\n    return x + 1\nexit(0)", MBPP)["score"] == 0.0
        pairs = {"inputs": ["3\n"], "outputs": ["9\n"]}
        assert score("apps", "print(int(input()) ** 2)", pairs)["score"] == 1.0
        assert score("apps", "print(3)", pairs)["score"] == 0.0

    path, _, body, _ = service.requests[0]
    assert path == "/run_code"
    assert (body["language"], body["run_timeout"], body["memory_limit_MB"]) == ("python", 4.0, 256)
    again = pickle.loads(pickle.dumps(make_service(service.url)))
    assert again.run("x = 1", ["assert x == 1"]).passed == [True]


def test_rules_by_verls_parameters(serve):
    service = serve(run_code)
    held = threading.Semaphore(1)
    for _ in range(2):
        result = default_compute_score(
            "mbpp", "def f(x):\n    return 2", MBPP, None, service.url, held, 300
        )
        assert result == {"score": 0.0, "passed": 0.5, "timed_out": 0.0}

    assert [body["memory_limit_MB"] for _, _, body, _ in service.requests] == [300, 300]
    assert held.acquire(blocking=False), "given back"
    assert (
        default_compute_score(
            "openai/gsm8k", "#### 4", "4", sandbox_fusion_url="http://127.0.0.1:9"
        )
        == 1.0
    )

    assert default_compute_score("openai/gsm8k", "it is 4", "4", method="flexible") == 1.0
    assert NaiveRewardManager(CharTokenizer(), 0, default_compute_score).by_rule


def test_a_late_program_and_a_broken_service(serve):
    late = {
        "status": "Failed",
        "run_result": {"status": "TimeLimitExceeded", "return_code": None, "stdout": ""},
    }
    assert make_service(serve(lambda body: (200, {}, late)).url).run("x", []).status == "timeout"
    broken = serve(lambda body: (200, {}, {"status": "SandboxError", "message": "no container"}))
    with pytest.raises(RewardError, match="no container"):
        make_service(broken.url).run("x", [])


# ---------------------------------------------------------------- from the configuration


def config(**reward_model: Any):
    return config_from_dict({"data": {"dataset_name": "toy"}, "reward_model": reward_model})


def test_an_unreachable_service_is_an_error_at_start_that_names_it():
    for section, key in (
        (
            {"judge": {"url": "http://127.0.0.1:9/v1", "model": "m"}},
            "reward_model.judge.url=http://127.0.0.1:9",
        ),
        (
            {"sandbox_fusion": {"url": "http://127.0.0.1:9"}},
            "reward_model.sandbox_fusion.url=http://127.0.0.1:9",
        ),
    ):
        with pytest.raises(ConfigError, match=f"{key}.*cannot be reached") as raised:
            build_reward(config(**section), CharTokenizer(), num_examine=0)
        assert "reached: Failed to establish a new connection" in str(raised.value)
        assert "HTTP" not in str(raised.value)  # no class of a connection or its pool


def test_the_configuration_names_judge_and_service(serve):
    judging = serve(says("Score: 5"))
    function = build_reward_function(
        config(judge={"url": judging.url, "model": "m", "score_scale": 5.0})
    )
    assert isinstance(function, Judge)
    assert function("s", "x", None)["score"] == 1.0
    runner = build_code_runner(
        config(sandbox_fusion={"url": serve(run_code).url, "max_concurrent": 5}).reward_model
    )
    assert isinstance(runner, SandboxService)
    assert runner.max_concurrent == 5


def test_the_configuration_reaches_the_manager(tmp_path):
    dapo = build_reward(
        config(
            reward_manager="dapo",
            on_error="retry",
            max_retries=4,
            timeout_s=9.0,
            overlong_buffer={"enable": True, "len": 4, "penalty_factor": 0.5},
        ),
        CharTokenizer(),
        num_examine=0,
    )
    assert (dapo.on_error, dapo.max_retries, dapo.timeout_s) == ("retry", 4, 9.0)

    assert (dapo.max_resp_len, dapo.buffer_len, dapo.penalty_factor) == (16, 4, 0.5)
    as_recipes_say = {"overlong_buffer_cfg": {"enable": True, "len": 2}, "max_resp_len": 8}
    dapo = build_reward(
        config(reward_manager="dapo", reward_kwargs=as_recipes_say), CharTokenizer(), num_examine=0
    )
    assert (dapo.max_resp_len, dapo.buffer_len) == (8, 2)

    with pytest.raises(ConfigError, match=r"reward_kwargs\.num_procs.*num_processes"):
        build_reward(
            config(reward_manager="prime", reward_kwargs={"num_procs": 1}),
            CharTokenizer(),
            num_examine=0,
        )

    naive = build_reward(config(rule_kwargs={"method": "flexible"}), CharTokenizer(), num_examine=0)
    assert naive(make_batch(["it is 4"], ["4"], ["gsm8k"])).sum() == 1.0
    (tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):\n   "
        " return bonus\n"
    )
    own = config_from_dict(
        {
            "data": {"dataset_name": "toy"},
            "custom_reward_function": {
                "path": str(tmp_path / "own.py"),
                "reward_kwargs": {"bonus": 3},
            },
        }
    )

    assert build_reward(own, CharTokenizer(), num_examine=0)(make_batch(["x"])).sum() == 3


def test_images_need_a_manager_that_takes_them(monkeypatch):
    class Plain:
        def __init__(self, tokenizer, num_examine, compute_score, reward_fn_key):
            pass

    monkeypatch.setattr(build, "reward_managers", SimpleNamespace(get=lambda name: Plain))
    build_reward(config(), CharTokenizer(), num_examine=0)
    with pytest.raises(ConfigError, match="reward_model.images=True: the manager 'naive' takes no"):
        build_reward(config(images=True), CharTokenizer(), num_examine=0)


def test_a_manager_gets_what_its_constructor_takes(monkeypatch):
    class Alone:
        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

    monkeypatch.setattr(build, "reward_managers", SimpleNamespace(get=lambda name: Alone))
    tokenizer = CharTokenizer()
    assert build_reward(config(), tokenizer, num_examine=0).tokenizer is tokenizer
    judged = config(judge={"url": "http://x", "model": "m"})
    with pytest.raises(
        ConfigError, match=r"judge\.url=http://x: .* takes no argument compute_score"
    ):
        build_reward(judged, tokenizer, num_examine=0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"judge": {"url": "http://x"}}, r"needs reward_model\.judge\.model"),
        ({"overlong_buffer": {"enable": True, "len": 4}}, "reward_manager=dapo"),
        (
            {"reward_manager": "dapo", "overlong_buffer": {"enable": True, "len": 2000}},
            r"at most data.max_response_length=16, got 2000. A fifth is usual: 3\.$",
        ),
        (
            {"reward_manager": "dapo", "overlong_buffer": {"enable": True, "len": 0}},
            "at least 1, .* got 0",
        ),
        ({"sandbox": {"isolation": "docker"}}, "unknown value 'docker'"),
    ],
)
def test_contradictions_are_reported(section, message):
    with pytest.raises(ConfigError, match=message):
        config(**section)


@pytest.mark.parametrize("text", ["Score: 1000000", "Score: 10.1", "Score: -1"])
def test_a_score_outside_the_scale_is_a_failed_call(serve, text):
    judge = make_judge(serve(says(text)).url)
    with pytest.raises(RewardError, match=r"from 0 to 10 \(reward_model\.judge\.score_scale\)"):
        judge("s", "x", None)
    result = NaiveRewardManager(CharTokenizer(), 0, judge, on_error="drop")(
        make_batch(["x"]), return_dict=True
    )
    assert result["dropped"] == [0]


def test_a_custom_scale_may_be_negative_and_a_match_may_not_be_a_number(serve):
    options = {"prompt": "{response}", "score_scale": 5.0, "score_pattern": r"S: (\S+)"}
    assert make_judge(serve(says("S: -5")).url, **options)("s", "x", None)["score"] == -1.0
    for text in ("S: -6", "S: good", "S: nan"):
        with pytest.raises(RewardError, match="from -5 to 5"):
            make_judge(serve(says(text)).url, **options)("s", "x", None)
