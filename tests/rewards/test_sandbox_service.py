"""A service that runs code."""

import pickle
import threading

import pytest

from tests.rewards.batches import CharTokenizer
from tests.rewards.services import FAST, run_code
from verl.compat.score import default_compute_score
from verl.config.reward import SandboxFusionConfig
from verl.rewards.managers import NaiveRewardManager
from verl.rewards.remote import SandboxService
from verl.rewards.rules import with_options
from verl.utils.errors import RewardError


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
