"""A judge behind a service, and requests of services."""

import pickle
import threading
from typing import Any

import pytest

from tests.rewards.batches import CharTokenizer, make_batch
from tests.rewards.services import FAST, says
from verl.config.reward import JudgeConfig, RequestsConfig
from verl.rewards.managers import NaiveRewardManager
from verl.rewards.remote import JsonClient, Judge
from verl.utils.errors import ConfigError, RewardError


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


def test_a_line_break_after_a_key_is_no_part_of_it(serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-1\r\n")
    service = serve(says("Score: 5"))
    assert make_judge(service.url, api_key_env="JUDGE_KEY")("s", "x", None)["score"] == 0.5
    _, headers, _, _ = service.requests[0]
    assert headers["Authorization"] == "Bearer sk-1"


@pytest.mark.parametrize("key", ["sk-hidden\nX-Header: 1", "sk-hidden\u2026"])
def test_a_key_that_no_header_carries_is_an_error_without_the_key(
    monkeypatch: pytest.MonkeyPatch, key: str
):
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(ConfigError, match=r"api_key_env=JUDGE_KEY: .* one line") as caught:
        make_judge("http://127.0.0.1:1", api_key_env="JUDGE_KEY")
    assert "hidden" not in str(caught.value)


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
