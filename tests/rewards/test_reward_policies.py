"""The policies on failures, and functions that fail and hang among a thousand samples."""

import threading

import pytest

from tests.rewards.batches import CharTokenizer, make_batch
from tests.rewards.plain_functions import fails_or_sleeps
from verl.rewards.custom import load_custom_reward
from verl.rewards.manager import NaiveRewardManager
from verl.rewards.managers import (
    PrimeRewardManager,
)
from verl.rewards.processes import ProcessFunction
from verl.utils.errors import RewardError


@pytest.mark.parametrize("kind", [NaiveRewardManager, PrimeRewardManager])
@pytest.mark.parametrize("policy", ["zero", "drop", "retry", "stop"])
def test_a_thousand_samples_of_which_one_percent_raise_and_one_percent_hang(
    reward_file, kind, policy, caplog
):
    function = load_custom_reward(reward_file, "one_in_a_hundred")
    # Late calls are simulated: a real deadline would depend on the load of the machine.
    settings = {"num_processes": 2} if kind is PrimeRewardManager else {}
    manager = kind(
        CharTokenizer(), 0, function, on_error=policy, max_retries=1, timeout_s=600, **settings
    )
    batch = make_batch([str(number) for number in range(1000)])

    if policy == "stop":
        with pytest.raises(RewardError, match=r"response (13|57) of the batch"):
            manager(batch)
        return

    with caplog.at_level("WARNING", logger="verl"):
        result = manager(batch, return_dict=True)
    bad = {number for number in range(1000) if number % 100 in (13, 57)}
    assert result["reward_tensor"].sum(-1).tolist() == [
        0.0 if row in bad else 1.0 for row in range(1000)
    ]
    assert result["dropped"] == ([] if policy == "zero" else sorted(bad))
    expected = {"reward/num_errors": 10, "reward/num_timeouts": 10}

    assert result["metrics"] == (
        expected | {"reward/num_retries": 20} if policy == "retry" else expected
    )
    assert "20 of 1000 rewards failed, 10 of them late" in caplog.text


@pytest.mark.parametrize(
    "kind", [NaiveRewardManager, pytest.param(PrimeRewardManager, marks=pytest.mark.slow)]
)
def test_only_hanging_calls_are_late(reward_file, kind):
    function = load_custom_reward(reward_file, "hangs_at")
    manager = kind(CharTokenizer(), 0, function, on_error="drop", timeout_s=2.0)
    result = manager(make_batch(["a", "hangs", "b", "c"]), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 0.0, 1.0, 1.0]
    assert result["metrics"] == {"reward/num_errors": 0, "reward/num_timeouts": 1}


@pytest.mark.slow
def test_calls_that_hang_step_after_step_move_to_processes_and_the_run_goes_on(monkeypatch, caplog):
    monkeypatch.setattr("verl.rewards.calls.MAX_HANGING", 1)
    manager = NaiveRewardManager(
        CharTokenizer(), 0, fails_or_sleeps, timeout_s=2.0, on_error="zero"
    )
    texts = ["fine"] * 50
    texts[13] = "raises"
    texts[37] = "sleeps"
    batch = make_batch(texts)
    with caplog.at_level("WARNING", logger="verl"):
        metrics = [manager(batch, return_dict=True)["metrics"] for _ in range(3)]
    assert metrics == [{"reward/num_errors": 1, "reward/num_timeouts": 1}] * 3
    assert caplog.text.count("From now on it is called in 4 processes") == 1
    assert isinstance(manager._caller.function, ProcessFunction)


def test_retry_repeats_only_failed_calls():
    calls: list[str] = []

    def flaky(data_source, solution_str, ground_truth, extra_info):
        calls.append(solution_str)
        if solution_str == "never" or (solution_str == "later" and calls.count("later") < 3):
            raise ConnectionError("not now")
        return 1.0

    manager = NaiveRewardManager(CharTokenizer(), 0, flaky, on_error="retry", max_retries=2)
    result = manager(make_batch(["fine", "later", "never"]), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 1.0, 0.0]
    assert result["dropped"] == [2]
    assert result["metrics"] == {
        "reward/num_errors": 1,
        "reward/num_timeouts": 0,
        "reward/num_retries": 4,
    }
    assert calls == ["fine", "later", "never", "later", "never", "later", "never"]


def test_several_threads_call_a_function_that_allows_it():
    together = threading.Barrier(8)

    def meets_seven_others(**_):
        together.wait(60)
        return 1.0

    meets_seven_others.max_concurrent = 8  # pyright: ignore[reportFunctionMemberAccess]
    manager = NaiveRewardManager(CharTokenizer(), 0, meets_seven_others, timeout_s=None)
    assert manager(make_batch(["a"] * 16)).sum() == 16
