"""Reports of the preflight for sound and for odd rewards, and its low cost."""

import itertools
import random
import time
from typing import Any

import pytest
import torch

from tests.rewards.batches import CharTokenizer
from verl.config.load import config_from_dict
from verl.rewards.custom import load_custom_reward
from verl.rewards.managers import (
    BatchRewardManager,
    DAPORewardManager,
    NaiveRewardManager,
    PrimeRewardManager,
)
from verl.rewards.preflight import choose_rows, gold_answers, inspect_reward, preflight
from verl.utils.errors import ConfigError, DataError, RewardError


def row(source: str, truth: Any, **extra: Any) -> dict[str, Any]:
    reward_model = {"style": "rule", "ground_truth": truth}
    return {"data_source": source, "reward_model": reward_model, "extra_info": extra}


ROWS = [row("toy", str(number)) for number in range(3, 9)]
SHIPPED = {
    "toy": ROWS,
    "gsm8k": [
        row("openai/gsm8k", "72", answer="so it is\n#### 72"),
        row("openai/gsm8k", "1200", answer="#### 1,200"),
    ],
    "gsm8k without solutions": [row("openai/gsm8k", "72"), row("openai/gsm8k", "-3.5")],
    "math": [
        row("lighteval/MATH", r"\frac{1}{2}", answer=r"\frac{1}{2}"),
        row("lighteval/MATH", "(2,3]"),
    ],
    "countdown": [
        row("countdown", {"target": 5, "numbers": [2, 3]}, solution="2 + 3"),
        row("countdown", {"target": 6, "numbers": [2, 3]}, solution="2 * 3"),
    ],
    "countdown without solutions": [row("countdown", {"target": 5, "numbers": [2, 3]})],
    "choice": [row("cais/mmlu", "B"), row("cais/mmlu", "D")],
    "search": [
        row("searchR1_nq", {"target": ["The Beatles"]}),
        row("searchR1_nq", {"target": ["Queen", "Queens"]}),
    ],
    "code": [
        row("mbpp", '{"test_list": ["assert f(1) == 2"]}', solution="def f(x):\n    return x + 1"),
        row("mbpp", '{"test_list": ["assert g(1) == 0"]}', solution="def g(x):\n    return x - 1"),
    ],
}


def naive(function=None, **settings):
    return NaiveRewardManager(CharTokenizer(), 0, function, **settings)


def inspect(manager, rows=ROWS):
    return inspect_reward(choose_rows(rows, 3), manager)


def gold(data_source, solution_str, ground_truth, extra_info=None):
    return float(str(ground_truth) in solution_str)


@pytest.mark.parametrize("task", SHIPPED)
def test_shipped_tasks_raise_no_alarm(task):
    report = inspect(naive(), SHIPPED[task])
    assert (report.faults, report.suspicions, report.notes) == ([], [], [])
    if "without solutions" not in task:
        assert max(probe.score for probe in report.probes if probe.kind == "gold") == 1.0
    assert max(probe.score for probe in report.probes if probe.kind == "wrong") == 0.0


def test_rows_are_spread_over_the_data():
    assert [number for number, _ in choose_rows(list(range(10)), 3)] == [0, 4, 9]  # pyright: ignore[reportArgumentType]
    assert [number for number, _ in choose_rows(ROWS[:1], 3)] == [0]


def test_a_row_that_a_dataset_does_not_give_is_named():
    class Own(list[Any]):
        def __getitem__(self, item: Any) -> Any:
            return super().__getitem__(item)["text"]

    message = (
        r"^The call for row 0 of the data set 'Own' \(.*\) raised KeyError in line \d+: 'text'"
    )
    with pytest.raises(DataError, match=message) as error:
        choose_rows(Own(ROWS), 3)
    assert isinstance(error.value.__cause__, KeyError)
    assert gold_answers({"extra_info": None}) == []


def failing_on(condition, value):
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        if condition(solution_str):
            if isinstance(value, Exception):
                raise value
            return value
        return gold(data_source, solution_str, ground_truth)

    return compute_score


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (
            failing_on(lambda text: True, KeyError("gone")),
            r"failed on \d+ of \d+.*row 0.*KeyError: 'gone'",
        ),
        (failing_on(lambda text: True, None), "returned None of type NoneType"),
        (
            failing_on(lambda text: text == "3", float("nan")),
            "row 0 .*gold answer '3'.*nan, not a finite",
        ),
        (failing_on(lambda text: "know" in text, "1.0"), "wrong answer 'I do not know.'.*type str"),
    ],
)
def test_faults_stop_a_run_under_the_policy_stop_and_are_logged_under_others(
    function, fault, caplog
):
    config = config_from_dict({"data": {"dataset_name": "toy"}})
    with pytest.raises(
        RewardError, match=f"(?s)Reward preflight: .*{fault}.*reward_model.preflight=False"
    ):
        preflight(config, ROWS, naive(function))
    preflight(config, ROWS, naive(function, on_error="zero"))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_error_shows_where_it_was_raised():
    config = config_from_dict({"data": {"dataset_name": "toy"}})
    with pytest.raises(RewardError, match=r'test_preflight\.py", line \d+, in compute_score'):
        preflight(config, ROWS, naive(failing_on(lambda text: True, KeyError("gone"))))


def test_an_error_of_a_process_that_was_killed_is_written_once(tmp_path):
    """The machine kills such a process when memory runs out."""
    path = tmp_path / "killed.py"
    path.write_text(
        "import os, signal\n\n\ndef compute_score(**_):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    config = config_from_dict({"data": {"dataset_name": "toy"}})
    with pytest.raises(RewardError) as caught:
        preflight(config, ROWS[:1], naive(load_custom_reward(str(path))))
    assert str(caught.value).count("was killed (SIGKILL); the machine may have run out of mem") == 1


def test_a_reward_that_raises_only_on_an_odd_answer_is_suspicious():
    report = inspect(naive(failing_on(lambda text: "know" in text, KeyError("gone"))))
    assert report.faults == []
    assert "failed on 3 of" in report.suspicions[0]
    assert report.suspicions[0].endswith("."), "another finding follows in the same line"


def test_a_hanging_reward_costs_one_deadline():
    report = inspect(naive(lambda **_: time.sleep(600), timeout_s=0.3))
    assert "no answer within 0.3 s" in report.faults[0]
    assert "reward_model.timeout_s" in report.faults[0]


def test_constant_inverted_and_random_rewards_are_suspicious(caplog):
    draw = itertools.count()
    for function, message in (
        (lambda **_: 0.5, "all 13 answers tried, gold and wrong, score 0.5"),
        (
            lambda **sample: -gold(**sample),
            "on 3 of 3 rows no gold answer scores above a wrong one. The first: row 0",
        ),
        (lambda **sample: gold(**sample) + next(draw) / 1e6, "two calls for one answer differ"),
    ):
        report = inspect(naive(function))
        assert report.faults == []
        assert message in report.suspicions[0]

        caplog.clear()
        preflight(config_from_dict({"data": {"dataset_name": "toy"}}), ROWS, naive(function))
        assert len(caplog.records) == 1
        assert message in caplog.text


def test_a_slow_reward_is_suspicious_but_not_its_first_call(monkeypatch):
    monkeypatch.setattr("verl.rewards.preflight.SLOW_S", 0.1)
    times = itertools.chain([0.5], itertools.repeat(0.0))
    loads = inspect(naive(lambda **sample: (time.sleep(next(times)), gold(**sample))[1]))
    assert not any("a call takes" in text for text in loads.suspicions)
    slow = inspect(naive(lambda **sample: (time.sleep(0.11), gold(**sample))[1]))
    assert "a call takes" in slow.suspicions[-1]
    assert "1,000 responses" in slow.suspicions[-1]


def test_a_function_that_processes_cannot_import_is_noted():
    assert inspect(naive(gold)).notes == []
    assert (
        "cannot be sent to another process"
        in inspect(naive(lambda **sample: gold(**sample))).notes[0]
    )


def test_data_without_ground_truth_is_not_suspicious():
    rows = [{"data_source": "own"}, {"data_source": "own"}]
    assert (
        inspect(naive(lambda **sample: float(len(sample["solution_str"]))), rows).suspicions == []
    )


def test_batch_and_prime_are_tried_too(tmp_path):
    def whole(data_sources, solution_strs, ground_truths, extra_infos):
        return [float(truth in text) for truth, text in zip(ground_truths, solution_strs)]

    assert inspect(BatchRewardManager(CharTokenizer(), 0, whole)).suspicions == []
    (tmp_path / "own.py").write_text(
        "def compute_score(solution_str, ground_truth, **others):\n    return ground_truth in "
        "solution_str\n"
    )
    function = load_custom_reward(str(tmp_path / "own.py"))
    assert (
        inspect(PrimeRewardManager(CharTokenizer(), 0, function, num_processes=1)).suspicions == []
    )


def test_it_leaves_random_numbers_unchanged():
    torch.manual_seed(3)
    random.seed(3)
    expected = (torch.rand(1), random.random())
    torch.manual_seed(3)
    random.seed(3)
    inspect(naive(lambda **sample: gold(**sample) + 0 * float(torch.rand(1)) + 0 * random.random()))
    assert (torch.rand(1), random.random()) == expected


def test_it_can_be_turned_off_but_rules_must_exist():
    off = config_from_dict({"data": {"dataset_name": "toy"}, "reward_model": {"preflight": False}})
    calls = []
    preflight(off, ROWS, naive(lambda **sample: calls.append(sample)))
    assert calls == []
    with pytest.raises(
        RewardError, match="^Row 1 of list: No reward rule for data_source 'mystery'. Correct it"
    ) as caught:
        preflight(off, [*ROWS[:1], row("mystery", "1")], naive())
    assert len(str(caught.value)) < 400
    odd = config_from_dict(
        {"data": {"dataset_name": "toy"}, "reward_model": {"rule_kwargs": {"methud": 1}}}
    )
    with pytest.raises(ConfigError, match="methud"):
        preflight(odd, ROWS, naive())


def test_dynamic_sampling_needs_a_field_that_the_reward_returns():
    def config(metric):
        filtered = {"adv_estimator": "grpo", "filter_groups": {"enable": True, "metric": metric}}
        return config_from_dict({"data": {"dataset_name": "toy"}, "algorithm": filtered})

    with pytest.raises(ConfigError, match="metric='acc' is no field .* returns: score. Return it"):
        preflight(config("acc"), ROWS, naive(gold))
    for metric in ("score", "seq_reward", "seq_final_reward"):
        preflight(config(metric), ROWS, naive(gold))
    preflight(config("acc"), ROWS, naive(lambda **sample: {"score": 1.0, "acc": gold(**sample)}))
    preflight(config("acc"), ROWS, DAPORewardManager(CharTokenizer(), 0, gold))


def test_it_is_cheap_on_the_toy_set():
    manager = naive()

    def seconds() -> float:
        began = time.process_time()
        inspect(manager)
        return time.process_time() - began

    assert min(seconds() for _ in range(3)) < 0.3


def reads_the_episode(data_source, solution_str, ground_truth, extra_info):
    """Read fields of an episode, as ReTool's reward does."""
    assert extra_info["messages"][-1] == {"role": "assistant", "content": solution_str}
    called = sum(extra_info["tool_rewards"]) + len(extra_info["rollout_reward_scores"])
    return gold(data_source, solution_str, ground_truth) + 0.1 * (
        extra_info["num_turns"] - 2 + called
    )


def test_a_reward_of_agents_gets_the_fields_of_an_episode():
    config = config_from_dict({"data": {"dataset_name": "toy"}})
    with pytest.raises(RewardError, match="KeyError: 'messages'"):
        preflight(config, ROWS, naive(reads_the_episode))

    report = inspect_reward(choose_rows(ROWS, 3), naive(reads_the_episode), plays_episodes=True)
    assert (report.faults, report.suspicions) == ([], [])
    assert "messages" not in ROWS[0]["extra_info"]


def test_a_key_that_an_agents_tools_may_add_is_only_suspicious(caplog):
    config = config_from_dict({"data": {"dataset_name": "toy"}})
    config.actor_rollout_ref.rollout.mode = "async"
    preflight(config, ROWS, naive(failing_on(lambda text: True, KeyError("of_a_tool"))))
    assert "KeyError: 'of_a_tool'" in caplog.text
    with pytest.raises(RewardError, match="ValueError"):
        preflight(config, ROWS, naive(failing_on(lambda text: True, ValueError("other"))))
