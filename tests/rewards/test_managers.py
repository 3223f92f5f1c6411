"""The managers batch and dapo, and the results of reward functions."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.rewards.batches import CharTokenizer, make_batch
from verl.rewards.calls import Caller
from verl.rewards.custom import load_custom_reward
from verl.rewards.manager import NaiveRewardManager
from verl.rewards.managers import (
    BatchRewardManager,
    DAPORewardManager,
    PrimeRewardManager,
    get_reward_manager_cls,
    register_reward_manager,
    reward_managers,
)
from verl.rewards.results import call_reward, checked_result
from verl.utils.errors import ConfigError, RewardError


def test_all_four_are_registered_and_a_user_may_add_one():
    for name, kind in {
        "naive": NaiveRewardManager,
        "batch": BatchRewardManager,
        "prime": PrimeRewardManager,
    }.items():
        assert get_reward_manager_cls(name) is kind
    assert get_reward_manager_cls("dapo") is DAPORewardManager

    @register_reward_manager("test_only")
    class Own(NaiveRewardManager):
        pass

    assert reward_managers.get("test_only") is Own


# ---------------------------------------------------------------- batch


def test_batch_makes_one_call_for_all(reward_file):
    function = load_custom_reward(reward_file, "whole", {"factor": 2}, for_batches=True)
    assert BatchRewardManager(CharTokenizer(), 0, function)(make_batch(["a", "bbb"])).sum(
        -1
    ).tolist() == [2.0, 6.0]
    with pytest.raises(ConfigError, match="data_source, solution_str"):
        load_custom_reward(reward_file, "whole")
    seen = []

    def fields(data_sources, solution_strs, ground_truths, extra_infos):
        seen.append((data_sources, solution_strs, ground_truths, extra_infos))
        return [{"score": 1.0, "note": text} for text in solution_strs]

    batch = make_batch(["x", "y"], ["1", "2"], ["s", "t"], [{"i": 0}, {"i": 1}])
    result = BatchRewardManager(CharTokenizer(), 0, fields)(batch, return_dict=True)
    assert seen == [(["s", "t"], ["x", "y"], ["1", "2"], [{"i": 0}, {"i": 1}])]
    assert result["reward_extra_info"] == {"note": ["x", "y"]}


def test_a_batch_function_may_be_async_and_rules_need_none():
    async def ones(data_sources, solution_strs, ground_truths, extra_infos):
        return torch.ones(len(solution_strs))

    assert BatchRewardManager(CharTokenizer(), 0, ones)(make_batch(["a"] * 3)).sum() == 3
    assert BatchRewardManager(CharTokenizer(), 0)(make_batch(["4", "5"], ["4", "4"])).sum(
        -1
    ).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("answer", [[1.0], [1.0] * 3, 1.0, None, []])
def test_a_batch_function_that_returns_another_number_of_scores_is_an_error_under_any_policy(
    answer,
):
    manager = BatchRewardManager(CharTokenizer(), 0, lambda **_: answer, on_error="zero")
    with pytest.raises(RewardError, match="one score for each of the 2 responses"):
        manager(make_batch(["a", "b"]))


def test_a_failing_batch_function_fails_for_all_and_a_bad_score_for_one():
    def raises(**_):
        raise KeyError("the key")

    result = BatchRewardManager(CharTokenizer(), 0, raises, on_error="drop")(
        make_batch(["a", "b"]), return_dict=True
    )
    assert result["dropped"] == [0, 1]
    with pytest.raises(RewardError, match="KeyError"):
        BatchRewardManager(CharTokenizer(), 0, raises)(make_batch(["a", "b"]))
    one_bad = BatchRewardManager(
        CharTokenizer(), 0, lambda **_: [1.0, float("nan")], on_error="drop"
    )
    assert one_bad(make_batch(["a", "b"]), return_dict=True)["dropped"] == [1]


# ---------------------------------------------------------------- dapo


def slow_reference(length: int, longest: int, buffer: int, factor: float) -> float:
    """Compute eq. (13) of the paper, case by case."""
    if length <= longest - buffer:
        return 0.0
    return factor * ((longest - buffer) - length) / buffer


@pytest.mark.parametrize("as_mapping", [True, False])
def test_dapo_punishes_the_last_part_of_a_response(as_mapping):
    settings = {"enable": True, "len": 4, "penalty_factor": 0.5, "log": True}
    config = settings if as_mapping else SimpleNamespace(**settings)
    manager = DAPORewardManager(
        CharTokenizer(),
        0,
        lambda **_: 1.0,
        max_resp_len=10,
        overlong_buffer_cfg=config,
        on_error="zero",
    )

    lengths = list(range(1, 11))  # including the special token at the end
    result = manager(make_batch(["a" * (length - 1) for length in lengths]), return_dict=True)
    expected = [1 + slow_reference(length, 10, 4, 0.5) for length in lengths]
    assert result["reward_tensor"].sum(-1).tolist() == pytest.approx(expected)
    assert expected[:6] == [1.0] * 6
    assert expected[-1] == 0.5
    extra = result["reward_extra_info"]
    assert extra["overlong"] == [float(length > 6) for length in lengths]

    assert extra["overlong_reward"] == pytest.approx([value - 1 for value in expected])


def test_dapo_without_a_buffer_is_naive():
    for config in (None, {"enable": False, "len": 4}):
        manager = DAPORewardManager(
            CharTokenizer(), 0, lambda **_: 1.0, max_resp_len=2, overlong_buffer_cfg=config
        )
        result = manager(make_batch(["aaaa"]), return_dict=True)
        assert result["reward_tensor"].sum() == 1
        assert result["reward_extra_info"]["acc"] == [1.0]


def test_dapo_keeps_the_score_before_the_penalty_as_acc():
    buffer = {"enable": True, "len": 2, "penalty_factor": 1.0}
    for score, acc in ((lambda **_: 1.0, 1.0), (lambda **_: {"score": 1.0, "acc": 0.5}, 0.5)):
        manager = DAPORewardManager(
            CharTokenizer(), 0, score, max_resp_len=5, overlong_buffer_cfg=buffer
        )
        result = manager(make_batch(["aaaa"]), return_dict=True)
        assert result["reward_tensor"].sum() == 0
        assert result["reward_extra_info"]["acc"] == [acc]


@pytest.mark.parametrize(("length", "longest"), [(0, 10), (11, 10), (4, None)])
def test_a_buffer_must_fit_the_response(length, longest):
    config = {"enable": True, "len": length, "penalty_factor": 1.0}
    with pytest.raises(ConfigError, match="overlong_buffer"):
        DAPORewardManager(CharTokenizer(), 0, max_resp_len=longest, overlong_buffer_cfg=config)


# ---------------------------------------------------------------- results


def test_a_result_of_the_wrong_shape_is_an_error_at_once():
    responses = torch.zeros(2, 3)
    good = {"reward_tensor": torch.ones(2, 3), "reward_extra_info": {"a": [1, 2]}}
    assert checked_result(good, responses)["reward_extra_info"] == {"a": [1, 2]}

    for change, message in (
        ({"reward_tensor": torch.ones(2)}, r"shape \(2, 3\), got torch.float32 of shape \(2,\)"),
        ({"reward_tensor": torch.ones(3, 3)}, r"got torch.float32 of shape \(3, 3\)"),
        ({"reward_tensor": torch.ones(2, 3).long()}, r"got torch.int64 of shape \(2, 3\)"),
        ({"reward_tensor": torch.ones(2, 3).bool()}, r"got torch.bool of shape \(2, 3\)"),
        ({"reward_tensor": torch.ones(2, 3).numpy()}, "got ndarray"),
        ({"reward_tensor": [1, 2]}, "got list"),
        ({"reward_tensor": torch.full((2, 3), torch.nan)}, "row 0 is nan, not a finite float32"),
        ({"reward_tensor": torch.full((2, 3), -torch.inf)}, "row 0 is inf, not a finite float32"),
        (
            {"reward_tensor": torch.tensor([[0.0, 1e15, 0.0], [-1e38, 0.0, 2.0]])},
            r"row 1 is 1e\+38, in magnitude larger than 1e\+15",
        ),
        (
            {"reward_extra_info": {"a": [1]}},
            r"'a' must have one entry for each of 2 responses, got\s+1",
        ),
        ({"reward_extra_info": {"a": 3}}, "'a' must have one entry for each of 2 .* got 3"),
        ({"reward_extra_info": {"a": "ab"}}, "'a' must have one entry for each of 2 .* got 'ab'"),
        ({"reward_extra_info": None}, "reward_extra_info must be a dict of lists .* got None"),
        ({"reward_extra_info": [1, 2]}, r"must be a dict of lists .* by name, got \[1, 2\]"),
        ({"reward_extra_info": {1: [1, 2]}}, r"by name, got \{1: \[1, 2\]\}"),
        ({"metrics": [1]}, r"metrics must be a dict of numbers by name, got \[1\]"),
        ({"metrics": {"mine": "a"}}, "metric 'mine' must be a number, got 'a' of type str"),
        ({"metrics": {"mine": torch.ones(2)}}, "metric 'mine' must be a number, .* of type Tensor"),
        ({"dropped": 1}, "dropped must be a list of rows, got 1"),
        ({"dropped": ["a"]}, "dropped rows must be among the 2 of the batch, from 0, got a"),
        ({"dropped": [0, 2]}, "dropped rows must be among the 2 of the batch, from 0, got 2"),
    ):
        with pytest.raises(RewardError, match=message):
            checked_result(good | change, responses)

    message = r"of shape \(2, 3\), got a tensor of shape \(2, 3\) without the dict"
    with pytest.raises(RewardError, match=message):
        checked_result(torch.ones(2, 3), responses)


def test_a_result_comes_in_one_form():
    result = {
        "reward_tensor": torch.ones(2, 3, dtype=torch.float64, requires_grad=True),
        "reward_extra_info": {"a": torch.tensor([0.5, 1.5]), "b": np.array([1, 2]), "c": (1, "x")},
        "metrics": {"mine/x": torch.tensor([3.0]), "mine/y": np.float32(0.5)},
        "dropped": torch.tensor([1]),
    }
    checked = checked_result(result, torch.zeros(2, 3))
    scores = checked.pop("reward_tensor")
    assert scores.dtype == torch.float32
    assert not scores.requires_grad
    assert checked == {
        "reward_extra_info": {"a": [0.5, 1.5], "b": [1, 2], "c": [1, "x"]},
        "metrics": {"mine/x": 3.0, "mine/y": 0.5},
        "dropped": [1],
    }


def test_an_error_of_a_program_s_own_reward_names_it_and_its_line():
    def own(batch, return_dict=False):
        return 1 / 0

    with pytest.raises(
        RewardError,
        match=r"The reward '.*own' \(.*test_managers.py\) raised ZeroDivisionError in line",
    ):
        call_reward(own, make_batch(["a"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [1.0]}, "got 1 scores and 2 dicts"),
        ({"extra": [{}]}, "got 2 scores and 1 dicts"),
        ({"scores": ["1", "2"]}, "got scores that are no numbers"),
        ({"scores": [(1, 2), (3, 4)]}, "got 2 scores and 2 dicts"),
        (None, "got NoneType"),
    ],
    ids=["one score", "one dict", "texts", "pairs", "nothing"],
)
def test_a_manager_of_ones_own_scores_every_response(change, message):
    class Own(NaiveRewardManager):
        def score(self, samples, data):
            result = super().score(samples, data)
            return None if change is None else replace(result, **change)

    manager = Own(CharTokenizer(), 0, lambda **_: 1.0)
    with pytest.raises(RewardError, match=f"Own.score must return Scores .* {message}"):
        manager(make_batch(["one", "two"], ["1", "2"]))


def test_a_shorter_deadline_for_some_calls():
    release = threading.Event()
    caller = Caller(lambda **_: release.wait(600), 600.0)
    (outcome,) = caller([{}], timeout_s=0.1)
    release.set()
    assert outcome is not None
    assert outcome.timed_out
