"""Code, multiple choice and search questions: written examples, and the gold solutions of real
data sets."""

import gzip
import json
from typing import Any

import numpy as np
import pytest

from tests.rewards.batches import CharTokenizer, make_batch
from tests.shared_files import SHARED, needs_shared
from verl.config.reward import SandboxConfig
from verl.rewards.builtin import choice, code, search_qa
from verl.rewards.managers import NaiveRewardManager, PrimeRewardManager
from verl.rewards.registry import answer_extractors
from verl.rewards.rules import calls_at_once, check_options, default_compute_score, with_options
from verl.rewards.sandbox.runner import LocalRunner, Run
from verl.utils.errors import ConfigError, RewardError

HUMANEVAL = {
    "prompt": 'import math\n\n\ndef helper(x):\n    return x\n\n\ndef half(x):\n    """Half of x."""\n',
    "test": "def check(candidate):\n    assert candidate(4) == 2\n    assert candidate(3) == 1.5\n",
    "entry_point": "half",
}
MBPP = {"test_list": ["assert f(1) == 2", "assert f(2) == 3"], "test_setup_code": ""}


class Recorder:
    """Record programs without running them."""

    max_concurrent = 7

    def __init__(self, *runs: Run) -> None:
        self.runs = list(runs)
        self.seen = []

    def run(self, code, tests, *, stdin=None):
        self.seen.append((code, tests, stdin))
        return self.runs.pop(0)


def test_code_is_taken_from_the_last_python_block():
    text = (
        "First ```python\nx = 1\n``` then\n```py\nx = 2\n```\n```bash\nls\n``` and\n```\nx = 3\n```"
    )
    assert code.extract_code(text) == "x = 3\n"
    assert code.extract_code("```python\nx = 4") == "x = 4", "cut off"
    assert code.extract_code("    return 5") == "    return 5"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("    return helper(x) / 2\n", 1.0),
        ("```python\n    return x / 2\n```", 1.0),
        ("Sure:\n```python\ndef half(x):\n    return math.floor(helper(x) / 2)\n```", 0.0),
        ("```python\ndef half(x):\n    return helper(x) / 2\n```", 1.0),
        ("    return x\n", 0.0),
        ("I cannot.", 0.0),
        ("", 0.0),
        ("    import os; os._exit(0)\n", 0.0),
        ("    return x / 2\nexit()\n", 0.0),
    ],
)
def test_humaneval(response, score):
    for truth in (HUMANEVAL, json.dumps(HUMANEVAL)):
        assert default_compute_score("openai/openai_humaneval", response, truth)["score"] == score


@pytest.mark.parametrize(
    "prompt",
    ["def half(x):\n", "def half(\n    x,\n):\n    # Return half of x.\n", "import math\n", ""],
)
def test_humaneval_with_a_prompt_that_has_no_docstring(prompt):
    truth = {**HUMANEVAL, "prompt": prompt}
    right = "def half(x):\n    return x / 2\n"
    wrong = "def half(x):\n    return x\n"
    assert code.score(right, truth)["score"] == 1.0
    assert code.score(wrong, truth)["score"] == 0.0
    with pytest.raises(RewardError, match="expects Python as the prompt .* got 'Write half"):
        code.score(right, {**HUMANEVAL, "prompt": "Write half of x."})


def test_mbpp_with_and_without_partial_credit():
    half = "def f(x):\n    return 2"
    assert default_compute_score("mbpp", half, MBPP) == {
        "score": 0.0,
        "passed": 0.5,
        "timed_out": 0.0,
    }
    assert default_compute_score("mbpp", half, MBPP, partial_credit=True)["score"] == 0.5
    whole = {**MBPP, "test_list": np.array(MBPP["test_list"], dtype=object)}
    assert default_compute_score("mbpp", "def f(x):\n    return x + 1", whole)["score"] == 1.0


def test_a_program_that_reads_and_prints():
    truth = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
    assert code.score("print(sum(map(int, input().split())), ' ')", truth)["score"] == 1.0
    wrong = code.score("print(3)", truth, partial_credit=True)
    assert (wrong["score"], wrong["passed"]) == (0.5, 0.5)
    assert code.score("print(3)\nraise SystemExit(1)", truth)["score"] == 0.0
    with pytest.raises(RewardError, match="2 inputs and 1 outputs"):
        code.score("", {"inputs": ["1", "2"], "outputs": ["1"]})


def test_a_function_by_arguments_and_results():
    plain = {"inputs": [[1, [2]], [3, [4]]], "outputs": [[1, 2], [3, 4]], "fn_name": "join"}
    text = {"inputs": ["1\n[2]", "3\n[4]"], "outputs": ["[1, 2]", "[3, 4]"], "fn_name": "join"}
    method = "class Solution:\n    def join(self, a, b):\n        return [a, *b]"
    for truth in (plain, text):
        assert code.score("def join(a, b):\n    return [a, *b]", truth)["score"] == 1.0
        assert code.score(method, truth)["score"] == 1.0
        assert code.score("def join(a, b):\n    return [a]", truth)["score"] == 0.0


def test_lines_of_input_and_output_may_be_a_list():
    truth = {"inputs": [["2", "1 2"]], "outputs": [["3", "2"]]}
    program = "n = int(input())\nprint(sum(map(int, input().split())))\nprint(n)"
    assert code.score(program, truth)["score"] == 1.0
    assert code.score("print(3)", truth)["score"] == 0.0


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        ([3], "3", "4"),  # a list of one, as APPS and TACO write a result
        ([[1, 2]], "[1, 2]", "[1]"),
        ([1, 2], "(1, 2)", "1"),
        ("[[1, 2]]", "(1, 2)", "(2, 1)"),
        ([True], "True", "False"),
    ],
)
def test_a_result_may_be_in_a_list_of_one_and_a_tuple_is_a_list(expected, right, wrong):
    truth = {"inputs": [[1]], "outputs": [expected], "fn_name": "f"}
    for value, score in ((right, 1.0), (wrong, 0.0)):
        program = f"list = 0\ndef f(x):\n    return {value}"
        assert code.score(program, truth)["score"] == score


def test_a_run_that_times_out_is_reported():
    runner = Recorder(
        Run(status="timeout", passed=[True]), Run(status="failed", passed=[True, True])
    )
    assert code.score("x", MBPP, runner=runner) == {"score": 0.0, "passed": 0.5, "timed_out": 1.0}
    assert code.score("x", MBPP, runner=runner)["passed"] == 0.0, "it left before its end"


@pytest.mark.parametrize("truth", ["[1]", {"tests": []}, {"test_list": "assert 1"}, 3])
def test_a_malformed_ground_truth_is_an_error(truth):
    with pytest.raises(RewardError, match="The code rule expects"):
        code.score("x", truth)


@pytest.mark.parametrize(
    "truth",
    [
        {"test_list": []},
        {"inputs": [], "outputs": []},
        {"inputs": [], "outputs": [], "fn_name": "f"},
    ],
)
def test_a_task_without_tests_is_an_error(truth: Any):
    with pytest.raises(RewardError, match="needs at least one test"):
        code.score("x = 1", truth)


@pytest.mark.parametrize(
    ("truth", "part"),
    [
        ('{"test_list": ["assert', "ground_truth"),
        ({"inputs": ["1\nx"], "outputs": ["1"], "fn_name": "f"}, "each line of inputs"),
        ({"inputs": ["1"], "outputs": ["yes"], "fn_name": "f"}, "outputs"),
    ],
)
def test_ground_truth_that_is_not_json_is_an_error(truth: Any, part: str):
    with pytest.raises(RewardError, match=f"The code rule expects JSON in {part}, got"):
        code.score("x", truth)


def test_the_configured_runner_reaches_the_rule_and_sets_its_concurrency():
    runner = Recorder(*[Run(status="finished", passed=[True, True])] * 4)
    function = with_options({}, runner)
    assert calls_at_once(function, ["mbpp", "toy"]) == 7
    assert calls_at_once(function, ["toy"]) == 1
    assert calls_at_once(len, ["mbpp"]) == 1
    scores = NaiveRewardManager(CharTokenizer(), 0, function)(
        make_batch(["a"] * 4 + ["1"], [MBPP] * 4 + ["1"], ["mbpp"] * 4 + ["toy"])
    )
    assert scores.sum(-1).tolist() == [1.0] * 5
    assert len(runner.seen) == 4


def test_the_sandbox_works_from_prime_processes():
    function = with_options({}, LocalRunner(SandboxConfig(timeout_s=5)))
    manager = PrimeRewardManager(CharTokenizer(), 0, function, num_processes=1)
    batch = make_batch(
        ["def f(x):\n    return x + 1", "def f(x):\n    return x"], [MBPP] * 2, ["mbpp"] * 2
    )
    assert manager(batch).sum(-1).tolist() == [1.0, 0.0]


@needs_shared("data/humaneval")
def test_all_humaneval_solutions_are_gold_and_empty_ones_are_not():
    text = gzip.decompress((SHARED / "data/humaneval/HumanEval.jsonl.gz").read_bytes()).decode()
    rows = [json.loads(line) for line in text.splitlines()]
    responses = [row["canonical_solution"] for row in rows] + ["    pass\n"] * len(rows)
    batch = make_batch(responses, rows * 2, ["openai/openai_humaneval"] * len(responses))
    scores = NaiveRewardManager(CharTokenizer(), 0)(batch).sum(-1).tolist()
    assert len(rows) == 164
    assert scores == [1.0] * 164 + [0.0] * 164


@needs_shared("data/mbpp")
def test_mbpp_solutions_are_gold():
    rows = [json.loads(line) for line in (SHARED / "data/mbpp/mbpp.jsonl").read_text().splitlines()]
    rows = rows[::8] + [row for row in rows if row["test_setup_code"]]
    batch = make_batch(
        [f"```python\n{row['code']}\n```" for row in rows], rows, ["mbpp"] * len(rows)
    )
    assert NaiveRewardManager(CharTokenizer(), 0)(batch).sum(-1).tolist() == [1.0] * len(rows)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so \\boxed{B}", "B", "B"),
        ("\\boxed{\\text{C}} is right", "C", "C"),
        ("\\boxed{\\textbf{C}}", "C", "C"),
        ("\\boxed{\\mathrm{C}}", "C", "C"),
        ("\\boxed{C. Paris}", "C", "C"),
        ("\\boxed{Berlin}", None, None),
        ("The answer is: $C$", "C", "C"),
        ("<answer>(D) because</answer>", "D", "D"),
        ("The answer is (A). No: the answer is B", "B", "B"),
        ("**Answer:** C", "C", "C"),
        ("Answer: **C**", "C", "C"),
        ("A", "A", "A"),
        (" (b) ", None, None),
        ("D.", "D", "D"),
        ("I think it must be C, as A man said", None, "C"),
        ("The answer is Because", None, None),
        ("A cat. I do not know", None, None),
        ("<answer>Apple</answer>", None, None),
        ("", None, None),
    ],
)
def test_choices(text, strict, flexible):
    assert choice.extract_choice(text) == strict
    assert choice.extract_choice(text, "flexible") == flexible


def test_the_gold_choice_is_a_letter_or_a_number():
    assert default_compute_score("cais/mmlu", "the answer is (C)", 2) == 1.0
    assert default_compute_score("cais/mmlu", "the answer is (C)", "c") == 1.0
    assert default_compute_score("cais/mmlu", "the answer is (C)", "(B)") == 0.0
    assert default_compute_score("multiple_choice/own", "C", "C") == 1.0
    with pytest.raises(RewardError, match="letter or an option"):
        default_compute_score("cais/mmlu", "C", "both")
    with pytest.raises(ConfigError, match="strict"):
        choice.extract_choice("C", "loose")  # pyright: ignore[reportArgumentType]


def test_search_answers_are_normalized_like_squad():
    truth = {"target": ["The Beatles", "Beatles, the band"]}
    score = search_qa.score
    assert score("<answer> the  beatles! </answer>", truth) == 1.0
    assert score("<answer>Queen</answer> or <answer>Beatles band</answer>", truth) == 1.0
    assert score("<answer>Beatles</answer> or <answer>Queen</answer>", truth) == 0.0
    assert score("the beatles", truth) == 0.0
    assert score("<answer>It was the Beatles</answer>", truth) == 0.0
    assert score("<answer>It was the Beatles</answer>", truth, method="substring") == 1.0

    assert score("<answer>Queen</answer>", truth, format_score=0.1) == 0.1
    for same in (
        np.array(["Beatles"], dtype=object),
        ["Beatles"],
        "Beatles",
        {"target": "Beatles"},
        '{"target": ["Queen", "Beatles"]}',
        '["Queen", "Beatles"]',
    ):
        assert default_compute_score("searchR1_nq", "<answer>Beatles</answer>", same) == 1.0

    for wrong in ({"answers": ["x"]}, [], {"target": None}, 3, "{'target': ['x']}", "[]"):
        with pytest.raises(RewardError, match="The search rule expects"):
            score("<answer>x</answer>", wrong)

    assert answer_extractors.get("hotpotqa")("<answer> x </answer>") == "x"


def test_options_of_rules_are_checked_by_name():
    check_options("openai/gsm8k", {"method": "flexible"})
    check_options("mbpp", {"partial_credit": True})
    with pytest.raises(ConfigError, match=r"rule_kwargs\.methud.*method, format_score"):
        check_options("openai/gsm8k", {"methud": "flexible"})
    with pytest.raises(ConfigError, match="no options"):
        check_options("toy", {"method": "flexible"})
    with pytest.raises(ConfigError, match="runner"):
        check_options("mbpp", {"runner": None})
    scorer = with_options({"method": "flexible"}, None)
    assert scorer("gsm8k", "it is 4", "4") == 1.0
    assert default_compute_score("gsm8k", "it is 4", "4") == 0.0
