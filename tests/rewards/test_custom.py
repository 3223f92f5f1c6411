"""Load a user's reward function from a file."""

import asyncio
import inspect

import pytest

from tests.rewards.batches import CharTokenizer, make_batch
from verl.rewards.custom import load_custom_reward
from verl.rewards.manager import NaiveRewardManager
from verl.utils.errors import ConfigError

FILE = """
async def judge(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    return {"score": scale * len(solution_str), "pred": solution_str}

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return len(solution_str) + kwargs.get("bonus", 0)

class Judge:
    def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return 7.0

judge_object = Judge()
number = 3

def two(data_source, solution_str):
    return 0.0

def of_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [0.0] * len(solution_strs)

def three(data_source, solution_str, ground_truth, scale=1.0):
    return scale * len(solution_str)

async def three_async(data_source, solution_str, ground_truth):
    return len(solution_str)
"""


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(FILE)
    return str(path)


def scores(function):
    return (
        NaiveRewardManager(CharTokenizer(), 0, function)(make_batch(["ab", "c"])).sum(-1).tolist()
    )


def test_plain_async_and_callable_objects(reward_file):
    assert scores(load_custom_reward(reward_file)) == [2.0, 1.0]
    assert scores(load_custom_reward(reward_file, "judge")) == [2.0, 1.0]
    assert scores(load_custom_reward(reward_file, "judge_object")) == [7.0, 7.0]
    assert load_custom_reward(None) is None


def test_a_function_may_do_without_extra_info(reward_file):
    assert scores(load_custom_reward(reward_file, "three", {"scale": 2.0})) == [4.0, 2.0]
    awaited = load_custom_reward(reward_file, "three_async")
    assert inspect.iscoroutinefunction(awaited)
    assert scores(awaited) == [2.0, 1.0]


def test_reward_kwargs_reach_every_call(reward_file):
    assert scores(load_custom_reward(reward_file, reward_kwargs={"bonus": 10})) == [12.0, 11.0]
    slow = load_custom_reward(reward_file, "judge", {"scale": 3.0})
    assert inspect.iscoroutinefunction(slow)
    assert asyncio.run(slow("s", "ab", None))["score"] == 6.0
    assert scores(slow) == [6.0, 3.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("compute_scor", "compute_score"),
        ("number", "must be a function"),
        ("two", "extra_info"),
        ("Judge", r"it is a class.*compute_score = Judge\(\)"),
    ],
)
def test_objects_that_cannot_be_called_are_rejected_at_start(reward_file, name, message):
    with pytest.raises(ConfigError, match=message):
        load_custom_reward(reward_file, name)


@pytest.mark.parametrize(
    ("name", "for_batches", "manager"), [("of_batch", False, "batch"), ("three", True, "naive")]
)
def test_a_function_for_another_manager_is_named_with_it(reward_file, name, for_batches, manager):
    with pytest.raises(
        ConfigError,
        match=rf"parameters of another .* Set reward_model\.reward_manager={manager}\.$",
    ):
        load_custom_reward(reward_file, name, for_batches=for_batches)


def test_unknown_reward_kwargs_and_files_are_rejected_at_start(reward_file, tmp_path):
    with pytest.raises(ConfigError, match="temperature"):
        load_custom_reward(reward_file, "judge", {"temperature": 1})
    with pytest.raises(ConfigError, match="Python file"):
        load_custom_reward(str(tmp_path / "other.py"))


def test_a_missing_file_or_module_is_named_with_its_key(tmp_path):
    key = r"custom_reward_function\.path"
    with pytest.raises(ConfigError, match=rf"{key}: expected a Python file at '.*missing\.py'"):
        load_custom_reward(str(tmp_path / "missing.py"))
    with pytest.raises(ConfigError, match=rf"{key}: cannot import 'no_such_module'"):
        load_custom_reward("no_such_module")
