"""The built-in rules on written examples and on real data."""

import itertools
import json
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared_files import SHARED, needs_shared
from verl.rewards.builtin import countdown, gsm8k, math
from verl.rewards.registry import RuleRegistry, answer_extractors
from verl.rewards.rules import default_compute_score
from verl.utils.errors import ConfigError, RewardError


def read_lines(relative: str) -> list[dict]:
    return [
        json.loads(line) for line in (SHARED / relative).read_text(encoding="utf-8").splitlines()
    ]


def test_unknown_data_source_is_an_error_that_names_the_known_ones_and_the_way_out():
    with pytest.raises(
        RewardError, match=r"(?s)opena/gsm8k.*openai/gsm8k.*custom_reward_function\.path"
    ):
        default_compute_score("opena/gsm8k", "#### 1", "1")


def test_missing_ground_truth_is_an_error():
    with pytest.raises(RewardError, match="ground_truth"):
        default_compute_score("openai/gsm8k", "#### 1", None)


def test_a_ground_truth_of_bytes_is_an_error():
    """Its text is "b'5'", which no answer equals."""
    with pytest.raises(RewardError, match=r"compares texts, .* is bytes: b'5'\. Decode it"):
        default_compute_score("toy", "5", b"5")


def test_exact_names_win_over_prefixes_and_longer_prefixes_over_shorter():
    rules = RuleRegistry("data source")
    for name in ("a*", "a/b*", "a/b/c"):
        rules.register(name)(lambda solution_str, ground_truth, extra_info, name=name: name)
    assert [rules.get(source)("", "", None) for source in ("a/x", "a/b/x", "a/b/c")] == [
        "a*",
        "a/b*",
        "a/b/c",
    ]
    assert "b" not in rules
    with pytest.raises(ConfigError, match="Unknown data source 'b'"):
        rules.get("b")


def test_toy_compares_the_stripped_response():
    assert default_compute_score("toy", " 7\n", "7") == 1.0
    assert default_compute_score("toy", "77", "7") == 0.0


def test_an_answer_of_more_digits_than_python_reads_is_wrong():
    for source in ("openai/gsm8k", "math", "calculator"):
        assert default_compute_score(source, "#### " + "1" * 5000, "1") == 0.0
    assert default_compute_score("calculator", "#### 1,024", "1024") == 1.0


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so it is\n#### 72", "72", "72"),
        ("#### 1,234,567.", "1234567", "1234567"),
        ("#### -5", "-5", "-5"),
        ("#### $-5.50 dollars", "-5.50", "-5.50"),
        ("####9 then #### 10", "10", "10"),
        ("she pays 3, then 4.", None, "4"),
        ("#### none, but 8", None, "8"),
        ("no number", None, None),
        ("a half is .5", None, ".5"),
    ],
)
def test_gsm8k_extraction(text, strict, flexible):
    assert gsm8k.extract_answer(text, "strict") == strict
    assert gsm8k.extract_answer(text, "flexible") == flexible


def test_gsm8k_compares_values_not_spellings():
    assert default_compute_score("openai/gsm8k", "#### 1,000.00", "1000") == 1.0
    assert default_compute_score("openai/gsm8k", "#### 1001", "1000") == 0.0
    assert default_compute_score("openai/gsm8k", "it is 1000", "1000") == 0.0
    assert default_compute_score("openai/gsm8k", "it is 1000", "1000", method="flexible") == 1.0
    assert default_compute_score("openai/gsm8k", "#### 3", "4", format_score=0.1) == 0.1


@pytest.mark.parametrize("truth", ["four", "#### four", "", ["3", "4"], {"answer": "4"}])
def test_gsm8k_refuses_a_ground_truth_without_a_number(truth):
    for text in ("#### 4", "no answer"):
        with pytest.raises(RewardError, match="expects a number as .* got .*custom_reward_func"):
            default_compute_score("openai/gsm8k", text, truth)


@pytest.mark.parametrize("truth", [4, 4.0, np.int64(4), np.float32(4), "4", "4 #### 4", "$4.00"])
def test_gsm8k_takes_numbers_of_any_kind(truth):
    assert default_compute_score("openai/gsm8k", "#### 4", truth) == 1.0


@pytest.mark.parametrize(("answer", "truth"), [("0.00001", 1e-5), ("3" + "0" * 20, 3e20)])
def test_gsm8k_takes_numbers_with_an_exponent(answer, truth):
    assert default_compute_score("openai/gsm8k", f"#### {answer}", truth) == 1.0
    assert default_compute_score("openai/gsm8k", "#### 5", truth) == 0.0


@given(st.integers(-(10**9), 10**9))
def test_gsm8k_reads_every_integer_back(number):
    for text in (
        f"x\n#### {number}",
        f"#### {number:,}",
        f"12 #### ${number:,}.",
        f"#### {number}.0",
    ):
        assert gsm8k.score(text, str(number)) == 1.0
        assert gsm8k.score(text, str(number + 1)) == 0.0


@needs_shared("data/gsm8k")
def test_real_gsm8k_answers_score_as_gold_and_shifted_ones_do_not():
    rows = read_lines("data/gsm8k/train.jsonl") + read_lines("data/gsm8k/test.jsonl")
    assert len(rows) == 7473 + 1319
    answers = [row["answer"] for row in rows]
    bare = [answer.split("####")[1].strip() for answer in answers]
    for method in ("strict", "flexible"):
        assert all(gsm8k.score(a, b, method=method) == 1.0 for a, b in zip(answers, bare))
    assert all(gsm8k.score(a, a) == 1.0 for a in answers)
    by_neighbour = [gsm8k.score(a, b) for a, b in zip(answers, bare[1:] + bare[:1])]
    equal = [
        float(a.replace(",", "")) == float(b.replace(",", ""))
        for a, b in zip(bare, bare[1:] + bare[:1])
    ]
    assert by_neighbour == [float(same) for same in equal]
    assert sum(by_neighbour) < 0.05 * len(rows)


def test_countdown_scores():
    task = {"target": 24, "numbers": [3, 8, 1]}
    score = countdown.score
    assert score("<answer>3 * 8 * 1</answer>", task) == 1.0
    assert score("<answer>(3*8)/1 = 24</answer>", json.dumps(task)) == 1.0
    assert score("<answer>5</answer> no: <answer>3 × 8 ÷ 1</answer>", task) == 1.0
    assert score("<answer>3*8</answer>", task) == 0.0
    assert score("<answer>3*8</answer>", task, use_all=False) == 1.0
    assert score("<answer>3*8*1*1</answer>", task, use_all=False) == 0.0

    assert score("<answer>24</answer>", task) == 0.0
    assert score("3*8*1", task) == 0.0
    assert score("<answer>3+8+1</answer>", task, format_score=0.1) == 0.1
    assert (
        default_compute_score(
            "countdown", "<answer>8/(3-8/3)</answer>", {"target": 24, "nums": [8, 3, 8, 3]}
        )
        == 1.0
    )


@pytest.mark.parametrize(
    "truth",
    [
        {"goal": 3},
        {"target": 3},
        {"target": "x", "numbers": [3]},
        {"target": 3, "numbers": 3},
        {"target": 3, "numbers": "[3]"},
        "24",
        "no JSON",
        None,
    ],
)
def test_countdown_without_a_task_is_an_error(truth):
    with pytest.raises(RewardError, match="expects ground_truth = {'target': 24"):
        countdown.score("<answer>1</answer>", truth)


@pytest.mark.parametrize(
    "equation",
    [
        "__import__('os').system('true')",
        "9**9**9**9",
        "1/0",
        "(",
        "1 if 2 else 3",
        "3.5+1",
        "True+1",
        "x",
        "1;2",
        "",
        "(" * 400 + "1" + ")" * 400,
        "1+" * 300,
        "-" * 499 + "1" * 2,
        "9" * 499,
        "lambda: 1",
        "1 1",
        "\x00",
    ],
)
def test_countdown_never_runs_or_fails_on_text_that_is_not_arithmetic(equation):
    assert countdown.score(f"<answer>{equation}</answer>", {"target": 1, "numbers": [1]}) == 0.0


@given(st.text(alphabet="0123456789+-*/() ", max_size=40))
@settings(max_examples=200)
def test_countdown_evaluates_as_python_does_with_exact_fractions(equation):
    result = countdown.evaluate(equation)
    if result is not None:
        assert float(result[0]) == pytest.approx(eval(equation), rel=1e-9)


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("so $\\boxed{\\dfrac12}$.", "\\frac{1}{2}", 1.0),
        ("\\boxed{3} or rather \\boxed{(2, 3]}", "(2,3]", 1.0),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        ("\\boxed{12}", "\\boxed{13}", 0.0),
        ("\\boxed{17}", "17\\%", 1.0),
        ("\\boxed{17 \\%}", "17", 1.0),
        ("\\boxed{37.5%}", "\\frac{75}{2} \\%", 1.0),
        ("the answer is 17%.", "17\\%", 1.0),
        ("\\boxed{18\\%}", "17\\%", 0.0),
        ("The final answer is $42$", "42", 1.0),
        ("\\boxed{\\frac{1}{", "0.5", 0.0),
        ("", "0.5", 0.0),
        ("\\boxed{}", "0.5", 0.0),
        ("\\boxed{\\frac{}{}^^__}}}", "0.5", 0.0),
        ("no idea", "0.5", 0.0),
    ],
)
def test_math_answers(answer, truth, score):
    assert default_compute_score("DigitalLearningGmbH/MATH-lighteval", answer, truth) == score


@pytest.mark.parametrize("source", ["math_dapo", "aime2024"])
def test_dapos_own_data_and_its_validation_have_a_rule(source):
    for number, score in ((34, 1.0), (35, 0.0)):
        answer = f"17 * 2 is it.\n\nAnswer: {number}"
        assert default_compute_score(source, answer, "34") == {"score": score, "acc": score}


def test_last_boxed_balances_its_brackets():
    assert (
        math.last_boxed("\\boxed{1} then \\boxed{\\sqrt{\\frac{a}{b}}} end")
        == "\\sqrt{\\frac{a}{b}}"
    )
    cases = "f = \\left\\{ {a \\atop b} \\right."
    assert math.last_boxed(f"\\boxed{{{cases}}}.") == cases
    assert math.last_boxed("\\boxed{\\{1, 2\\}}") == "\\{1, 2\\}"
    assert math.last_boxed("\\boxed 7$ and") == "7"
    assert math.last_boxed("\\boxed{7") is None
    assert math.last_boxed("7") is None


@needs_shared("data/math")
def test_math500_solutions_score_as_gold_and_their_neighbors_do_not():
    rows = read_lines("data/math/math500.jsonl")[:200]
    scores = [
        default_compute_score("HuggingFaceH4/MATH-500", row["solution"], row["answer"])
        for row in rows
    ]
    assert scores == [1.0] * len(rows)
    wrong = [
        default_compute_score("HuggingFaceH4/MATH-500", row["solution"], other["answer"])
        for row, other in itertools.pairwise(rows[:60])
    ]
    assert sum(wrong) <= 3


@needs_shared("data/math")
def test_math_verify_itself_recognises_gold_answers():
    """Bypass the shortcut for equal spellings: compare each answer with itself in brackets."""
    rows = read_lines("data/math/math500.jsonl")[:60]
    same = [math._equal(f"\\boxed{{{row['answer']}}}", f"${row['answer']}$") for row in rows]
    assert all(same)


def test_math_works_in_threads_and_a_symbolic_explosion_scores_zero():
    results: dict[str, float] = {}
    cases = {"\\boxed{9^{9^{9}}}": "3", "\\boxed{0.25}": "\\frac14"}

    def run(answer: str) -> None:
        results[answer] = math.score(answer, cases[answer])

    threads = [threading.Thread(target=run, args=(answer,)) for answer in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"\\boxed{9^{9^{9}}}": 0.0, "\\boxed{0.25}": 1.0}


def test_a_math_helper_that_is_killed_is_replaced_and_a_slow_one_scores_zero(monkeypatch):
    assert math.score("\\boxed{0.5}", "\\frac{1}{2}") == 1.0
    pool = math._compare._pool
    helper = pool._borrow()
    pool._idle.append(helper)
    helper._process.kill()
    helper._process.wait()
    assert math.score("\\boxed{0.5}", "\\frac{1}{2}") == 1.0
    monkeypatch.setattr(math._compare, "timeout_s", 0.5)
    assert math.score("\\boxed{9^{9^{9}}}", "3") == 0.0


def test_a_fork_does_not_affect_the_helpers_of_its_parent():
    code = """
        import os, sys
        from verl.rewards.builtin import math
        def half():
            return math.score("\\\\boxed{0.5}", "\\\\frac{1}{2}")
        half()
        idle = math._compare._pool._idle
        (helper,) = idle
        if (child := os.fork()) == 0:
            sys.exit(not (half() and helper not in idle))
        print(os.waitpid(child, 0)[1], half(), list(idle) == [helper])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )

    assert done.stdout == "0 1.0 True\n", done.stderr


def test_the_rewards_package_loads_neither_torch_nor_sympy():
    code = (
        "import sys, verl.rewards.builtin.gsm8k; print({'torch', 'sympy', 'math_verify'} & "
        "set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "set()"
    )


@pytest.mark.parametrize(
    ("source", "text", "answer"),
    [
        ("openai/gsm8k", "so it is\n#### 1,200", "1200"),
        ("openai/gsm8k", "I cannot tell", None),
        ("lighteval/MATH", r"thus \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("toy", " 14 ", "14"),
    ],
)
def test_a_vote_counts_the_answer_of_a_response(source, text, answer):
    assert answer_extractors.get(source)(text) == answer
