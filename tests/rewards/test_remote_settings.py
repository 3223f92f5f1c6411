"""Judges, services and managers as the configuration names them."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.rewards.batches import CharTokenizer, make_batch
from tests.rewards.services import run_code, says
from verl.config.load import config_from_dict
from verl.rewards import build
from verl.rewards.build import build_code_runner, build_reward, build_reward_function
from verl.rewards.remote import Judge, SandboxService
from verl.utils.errors import ConfigError


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
