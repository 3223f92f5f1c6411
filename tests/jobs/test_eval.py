"""Scores of responses in a file: estimators against enumeration, and the whole job against scores
computed by hand."""

import itertools
import json
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.runs import write_lines
from verl.jobs import evaluation
from verl.jobs.main_eval import main
from verl.jobs.scores import bootstrap_intervals, majority_at_k, pass_at_k
from verl.rewards.manager import NaiveRewardManager

REPOSITORY = Path(__file__).parents[2]

# ---- estimators ----------------------------------------------------------------------------------


def test_pass_at_k_is_the_fraction_of_subsets_with_a_passing_response():
    for n in range(1, 9):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            passed = [number < c for number in range(n)]
            expected = np.mean([any(choice) for choice in itertools.combinations(passed, k)])
            assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_of_many_responses_stays_finite():
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    assert pass_at_k(100_000, 10, 1) == pytest.approx(1e-4)


@given(votes=st.lists(st.tuples(st.sampled_from("aabc-"), st.floats(0, 1)), min_size=1, max_size=7))
def test_majority_at_k_is_the_mean_over_all_subsets_of_k(votes):
    answers = [None if answer == "-" else answer for answer, _ in votes]
    scores = [score for _, score in votes]
    for k in range(1, len(votes) + 1):
        choices = itertools.combinations(range(len(votes)), k)
        expected = np.mean([majority_score(choice, answers, scores) for choice in choices])
        assert majority_at_k(answers, scores, k) == pytest.approx(expected, abs=1e-12)


def majority_score(
    choice: tuple[int, ...], answers: list[str | None], scores: list[float]
) -> float:
    """Return the mean score of the most frequent answer; average over tied answers."""
    votes = Counter(answers[i] for i in choice if answers[i] is not None)
    if not votes:
        return float(np.mean([scores[i] for i in choice]))
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return float(
        np.mean(
            [np.mean([scores[i] for i in choice if answers[i] == answer]) for answer in winners]
        )
    )


def test_majority_of_many_responses():
    answers = ["right"] * 104 + ["wrong"] * 96
    scores = [1.0] * 104 + [0.0] * 96
    at_once = majority_at_k(answers, scores, 199)
    assert at_once == pytest.approx(1.0)
    assert majority_at_k(answers, scores, 1) == pytest.approx(0.52)
    assert 0.52 < majority_at_k(answers, scores, 101) < at_once


def test_confidence_bounds_are_those_of_a_mean_of_many_prompts():
    values = np.random.default_rng(1).normal(3.0, 2.0, size=(400, 2))
    values[300:, 1] = np.nan  # prompts without this value
    low, high = bootstrap_intervals(values, confidence=0.9, resamples=2000, seed=0)
    for column, count in ((0, 400), (1, 300)):
        present = values[:count, column]
        half = 1.645 * present.std() / np.sqrt(count)
        assert low[column] == pytest.approx(present.mean() - half, abs=0.25 * half)
        assert high[column] == pytest.approx(present.mean() + half, abs=0.25 * half)
    again, _ = bootstrap_intervals(values, confidence=0.9, resamples=2000, seed=0)
    assert (again == low).all()


# ---- the whole job -------------------------------------------------------------------------------


def row(source: str, truth: str, *responses: str, **columns: Any) -> dict[str, Any]:
    reward_model = {"style": "rule", "ground_truth": truth}
    prompt = [{"role": "user", "content": f"What is {truth}?"}]
    return {
        "data_source": source,
        "prompt": prompt,
        "reward_model": reward_model,
        "responses": responses,
        **columns,
    }


TWO_SOURCES = [
    row("toy", "4", "4", "4", "5", "5"),
    row("toy", "6", "6", "7", "8", "8"),
    row("openai/gsm8k", "9", "#### 9", "#### 9", "#### 8", "I do not know."),
]


def evaluate(folder: Path, lines: list[dict[str, Any]], *overrides: str) -> dict[str, Any]:
    path = write_lines(folder / "responses.jsonl", lines)
    output = folder / "scores.json"
    assert main([f"data.path={path}", f"data.output_path={output}", *overrides]) == 0
    return json.loads(output.read_text(encoding="utf-8"))


def values(summary: dict[str, Any]) -> dict[str, float]:
    return {name: entry["value"] for name, entry in summary.items() if isinstance(entry, dict)}


def test_rules_score_by_data_source(tmp_path, capsys):
    report = evaluate(tmp_path, TWO_SOURCES)
    toy = report["data_sources"]["toy"]
    gsm8k = report["data_sources"]["openai/gsm8k"]
    assert values(toy) == pytest.approx(
        {
            "mean": (2 / 4 + 1 / 4) / 2,
            "pass@1": (2 / 4 + 1 / 4) / 2,
            "pass@2": (1 - 1 / 6 + 1 / 2) / 2,
            "pass@4": 1.0,
            "maj@2": (2 / 4 + 1 / 4) / 2,
            "maj@4": (1 / 2 + 0) / 2,
        }
    )

    assert values(gsm8k)["maj@4"] == 1.0
    assert (toy["prompts"], toy["responses"], report["all"]["prompts"]) == (2, 8, 3)
    assert values(report["all"])["mean"] == pytest.approx((2 / 4 + 1 / 4 + 2 / 4) / 3)
    assert report["intervals"]["method"] == "percentile bootstrap over prompts"
    assert toy["mean"]["low"] == pytest.approx(0.25)
    assert toy["mean"]["high"] == pytest.approx(0.5)
    table = capsys.readouterr().out
    assert len([line for line in table.splitlines() if line.startswith("openai/gsm8k")]) == 6

    assert len([line for line in table.splitlines() if line.startswith("all ")]) == 6
    assert "percentile bootstrap over prompts" in table


def test_a_single_source_is_printed_once(tmp_path, capsys):
    evaluate(tmp_path, [row("toy", "4", "4", "5")])
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert "toy" in names
    assert "all" not in names


def test_prompts_with_other_numbers_of_responses_count_where_possible(tmp_path):
    report = evaluate(
        tmp_path, [row("toy", "4", "4", "5"), row("toy", "6", *"66666")], "metrics.k=[4,1]"
    )
    toy = report["data_sources"]["toy"]
    assert {name: entry["prompts"] for name, entry in toy.items() if isinstance(entry, dict)} == {
        "mean": 2,
        "pass@1": 2,
        "pass@4": 1,
        "maj@4": 1,
    }


CUSTOM = """
import time

def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "slow":
        time.sleep(30)
    if solution_str == "bad":
        raise KeyError("no such answer")
    return {"score": 2.0 * (solution_str == ground_truth) - 1.0, "acc": solution_str == ground_truth,
            "pred": solution_str, "bonus": extra_info["bonus"]}

def graded(data_source, solution_str, ground_truth, extra_info=None):
    return 0.9 if solution_str == ground_truth else 0.1
"""


@pytest.fixture
def custom(tmp_path) -> list[str]:
    path = tmp_path / "rewards.py"
    path.write_text(CUSTOM, encoding="utf-8")
    return [f"custom_reward_function.path={path}", "custom_reward_function.name=score"]


def test_a_custom_function_defines_passes_and_votes(tmp_path, custom):
    lines = [row("mine", "a", "a", "a", "b", extra_info={"bonus": 1})]
    found = values(evaluate(tmp_path, lines, *custom)["data_sources"]["mine"])
    assert found["mean"] == pytest.approx(1 / 3)
    assert found["pass@1"] == pytest.approx(2 / 3), (
        "by acc: the mean score is no share of right answers"
    )
    assert found["maj@3"] == 1.0


def test_a_score_equal_to_the_threshold_passes(tmp_path, custom):
    lines = [row("mine", "a", "a", "b")]
    graded = [custom[0], "custom_reward_function.name=graded"]
    assert values(evaluate(tmp_path, lines, *graded)["all"])["pass@2"] == 0.0
    found = values(evaluate(tmp_path, lines, *graded, "metrics.pass_score=0.9")["all"])
    assert (found["pass@1"], found["pass@2"]) == (0.5, 1.0)
    assert "maj@2" not in found, "this function gives no answer to vote for"


def test_failures_count_as_in_training(tmp_path, custom, capsys):
    lines = [row("mine", "a", "a", "bad", "slow", "a", extra_info={"bonus": 1})]
    quick = [*custom, "reward_model.timeout_s=0.5"]
    report = evaluate(tmp_path, lines, *quick, "reward_model.on_error=zero")
    assert values(report["all"])["mean"] == pytest.approx((1 + 0 + 0 + 1) / 4)
    assert report["failures"] == {"errors": 1, "timeouts": 1, "retries": 0, "dropped": 0}
    report = evaluate(tmp_path, lines, *quick, "reward_model.on_error=drop")
    assert values(report["all"])["mean"] == 1.0
    assert (report["all"]["responses"], report["failures"]["dropped"]) == (2, 2)

    assert "2 dropped" in capsys.readouterr().out
    found = values(
        evaluate(tmp_path, lines, *quick, "reward_model.on_error=drop", "metrics.k=[2,4]")["all"]
    )
    assert (found["pass@2"], "pass@4" in found) == (1.0, False), "two responses are left"
    assert "metrics.k above 2 is left out" in capsys.readouterr().out
    assert main([f"data.path={tmp_path / 'responses.jsonl'}", *quick]) == 1
    output = capsys.readouterr().err

    assert "responses.jsonl, row 0, response " in output
    assert "no such answer" in output
    assert "What is a?" in output


def test_responses_are_scored_in_calls_of_limited_size(tmp_path, monkeypatch):
    expected = evaluate(tmp_path, TWO_SOURCES)
    monkeypatch.setattr(evaluation, "RESPONSES_A_CALL", 5)
    assert evaluate(tmp_path, TWO_SOURCES) == expected


def test_a_row_without_ground_truth_is_reported_before_any_is_scored(tmp_path, monkeypatch, capsys):
    lines = [*TWO_SOURCES, row("toy", "4", "4") | {"reward_model": {"style": "rule"}}]
    path = write_lines(tmp_path / "responses.jsonl", lines)
    scored: list[Any] = []
    monkeypatch.setattr(NaiveRewardManager, "score", lambda _self, *given: scored.append(given))

    assert main([f"data.path={path}"]) == 1
    output = capsys.readouterr().err
    assert "row 3: The rule for data_source 'toy' needs reward_model.ground_truth" in output
    assert "Traceback" not in output
    assert not scored


@pytest.mark.parametrize(
    ("line", "overrides", "message"),
    [
        ({"prompt": "1 + 1"}, [], "the column 'responses' is missing"),
        (row("toy", "4"), [], "row 0, column 'responses': must be a list of texts"),
        (row("toys", "4", "4"), [], "row 0: No reward rule for data_source 'toys'"),
        (
            {"prompt": "1 + 1", "responses": ["2"]},
            [],
            "row 0: There is no data_source, which picks the reward rule. Add the column "
            "(data.data_source_key names another one)",
        ),
        (row("toy", "4", "4"), ["data.prompt_key=question"], "the column 'question' is missing"),
        (row("toy", "4", "4"), ["data.data_source_key=origin"], "the column 'origin' is missing"),
        (row("toy", "4", "4"), ["data.reward_model_key=gold"], "name it in data.reward_model_key"),
        (row("toy", "4", "4"), ["data.extra_info_key=more"], "the column 'more' is missing"),
    ],
    ids=[
        "no responses",
        "none of one row",
        "unknown source",
        "no source",
        "no column of prompts",
        "no column of sources",
        "no column of truths",
        "no column of extra information",
    ],
)
def test_errors_in_the_inputs_are_reported(tmp_path, capsys, line, overrides, message):
    path = write_lines(tmp_path / "responses.jsonl", [line])
    assert main([f"data.path={path}", *overrides]) == 1
    assert message in capsys.readouterr().err


def test_a_missing_file_is_named_with_the_key_that_gives_it(tmp_path, capsys):
    path = tmp_path / "responses.parquet"
    assert main([f"data.path={path}"]) == 1
    assert capsys.readouterr().err.strip() == (
        f"DataError: Data file '{path}' does not exist; no data file is in that folder. Correct "
        "the path (data.path), or make the file with `verl generate`."
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "metrics.k=[1,2]",
            "metrics.k=[1, 2] needs more responses than any prompt has, which is 1",
        ),
        ("data.output_path={}", "data.output_path must name a file, got the folder"),
        ("data.output_path={}/responses.jsonl/scores.json", "scores.json' cannot be written: "),
    ],
    ids=["k too large", "a folder", "no folder"],
)
def test_settings_that_make_scores_worthless_are_reported_before_scoring(
    tmp_path, capsys, monkeypatch, override, message
):
    monkeypatch.setattr(evaluation, "score", lambda *_: pytest.fail("scored"))
    path = write_lines(tmp_path / "responses.jsonl", [row("toy", "4", "4")])
    assert main([f"data.path={path}", override.format(tmp_path)]) == 1
    assert message in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["responses.jsonl"]


def test_the_old_name_of_the_r1_recipe_runs_the_same_job(tmp_path, monkeypatch):
    expected = evaluate(tmp_path, TWO_SOURCES)
    (tmp_path / "old").mkdir()
    output = tmp_path / "old" / "scores.json"
    function = REPOSITORY / "recipe" / "r1" / "reward_score.py"
    asked = [
        f"data.path={tmp_path / 'responses.jsonl'}",
        "data.prompt_key=prompt",
        "data.response_key=responses",
        f"data.output_path={output}",
        f"custom_reward_function.path={function}",
        "custom_reward_function.name=reward_func",
    ]

    monkeypatch.setattr(sys, "argv", ["main_eval", *asked])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("recipe.r1.main_eval", run_name="__main__")
    assert ended.value.code == 0
    assert json.loads(output.read_text(encoding="utf-8")) == expected


def test_the_r1_recipe_scores_its_competitions_as_mathematics(tmp_path):
    function = REPOSITORY / "recipe" / "r1" / "reward_score.py"
    by_recipe = [
        f"custom_reward_function.path={function}",
        "custom_reward_function.name=reward_func",
    ]
    lines = [
        row("Maxwell-Jia/AIME_2024", "113", r"\boxed{113}", r"so it is \boxed{113}", r"\boxed{7}")
    ]
    found = values(evaluate(tmp_path, lines, *by_recipe)["all"])
    assert (found["mean"], found["maj@3"]) == (pytest.approx(2 / 3), 1.0)
