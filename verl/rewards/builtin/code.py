"""Score programs by their tests in the sandbox: HumanEval, MBPP, and tasks of input and output.

The ground truth is a mapping, or the same as JSON text, in one of these forms:

    {"prompt": ..., "test": ..., "entry_point": ...}
        HumanEval (Chen et al. 2021, arXiv:2107.03374). `test` defines check(candidate); the
        response completes or replaces the prompt.
    {"test_list": ["assert ...", ...], "test_setup_code": ""}
        MBPP (Austin et al. 2021, arXiv:2108.07732).
    {"inputs": [...], "outputs": [...]}
        The input and the expected output of a script, pair by pair (APPS, TACO).
    {"inputs": [...], "outputs": [...], "fn_name": ...}
        Arguments and results of a function, or of a method of the class Solution.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl.rewards.registry import reward_rules
from verl.rewards.sandbox.runner import CodeRunner, default_runner
from verl.utils.errors import RewardError
from verl.utils.json_text import parse_json

_BLOCK = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("python", "python3", "py", "")


def extract_code(text: str) -> str:
    """Return the last code block marked as Python or unmarked; without one, the whole response."""
    blocks = [code for language, code in _BLOCK.findall(text) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else text


def runs_code(rule: Any) -> Any:
    """Mark a rule that takes `runner=`, the CodeRunner of the run."""
    rule.runs_code = True
    return rule


@reward_rules.register(
    "openai/openai_humaneval",
    "humaneval*",
    "evalplus/humanevalplus",
    "mbpp*",
    "google-research-datasets/mbpp",
    "evalplus/mbppplus",
    "code*",
    "apps",
    "taco",
    "livecodebench*",
)
@runs_code
def score(
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    runner: CodeRunner | None = None,
    partial_credit: bool = False,
) -> dict[str, Any]:
    """Return a score of 1 if the program passes every test, else 0.

    The fields `passed` (the share of the tests) and `timed_out` become metrics.

    Args:
        runner: the runner of programs; None selects the sandbox of this machine.
        partial_credit: score the share of tests that pass instead.

    Raises:
        RewardError: the ground truth has none of the forms above or no test, or the sandbox itself
            fails.
    """
    runner = runner or default_runner()
    truth = ground_truth
    if isinstance(ground_truth, str):
        truth = _json(ground_truth, "ground_truth")
    code = extract_code(solution_str)

    match truth:
        case {"entry_point": str(name), "test": str(test)}:
            prompt = str(truth.get("prompt", ""))
            redefines = re.search(rf"^def\s+{re.escape(name)}\b", code, re.MULTILINE) is not None
            program = f"{_finished(prompt)}\n{code}" if redefines else prompt + code
            verdicts, late = _by_tests(runner, program, [f"{test}\ncheck({name})"])

        case {"test_list": tests} if _is_list(tests):
            setup = str(truth.get("test_setup_code") or "")
            program = f"{code}\n{setup}"
            verdicts, late = _by_tests(runner, program, list(map(str, tests)))

        case {"inputs": inputs, "outputs": outputs} if _is_list(inputs) and _is_list(outputs):
            if len(inputs) != len(outputs):
                raise RewardError(
                    f"A code task needs an output for every input, got {len(inputs)} inputs and "
                    f"{len(outputs)} outputs."
                )
            if truth.get("fn_name"):
                calls = _calls(str(truth["fn_name"]), inputs, outputs)
                verdicts, late = _by_tests(runner, code, calls)
            else:
                verdicts, late = _by_output(
                    runner, code, inputs, outputs, stop_early=not partial_credit
                )

        case _:
            raise RewardError(
                "The code rule expects ground_truth = {'prompt', 'test', 'entry_point'}, "
                "{'test_list'} or {'inputs', "
                f"'outputs'}}, got {str(ground_truth)[:200]!r}."
            )

    if not verdicts:
        raise RewardError(
            "A code task needs at least one test, or every program scores 0, got "
            f"{str(ground_truth)[:200]!r}. Add the tests, or leave the row out."
        )
    passed = sum(verdicts) / len(verdicts)
    score = passed if partial_credit else float(passed == 1.0)
    return {"score": score, "passed": passed, "timed_out": float(late)}


def _finished(prompt: str) -> str:
    """Return a prompt that runs alone, so that a later definition of its function replaces it.

    A signature with a docstring runs as it is. One without a body, or with comments alone, gets a
    body.
    """
    for program in (prompt, f"{prompt.rstrip()}\n    pass\n"):
        try:
            ast.parse(program)
        except SyntaxError:
            continue
        return program
    raise RewardError(
        "The code rule expects Python as the prompt in ground_truth, up to the body of the "
        f"function, got {prompt[:200]!r}. Correct the row, or leave the prompt out if responses "
        "are whole functions."
    )


def _is_list(value: Any) -> bool:
    """Return whether a value is a list, or the array that Parquet returns for one."""
    return not isinstance(value, (str, bytes, Mapping)) and hasattr(value, "__len__")


def _by_tests(runner: CodeRunner, code: str, tests: list[str]) -> tuple[list[bool], bool]:
    run = runner.run(code, tests)
    # Tests that did not end have failed. If the program exited early, all tests have failed.
    passed = run.passed if run.status != "failed" else []
    return passed + [False] * (len(tests) - len(passed)), run.status == "timeout"


def _calls(name: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[str]:
    """Return tests that call a function and compare its result.

    Arguments are a list, or JSON text with one argument per line.
    """
    find = f"(Solution().{name} if 'Solution' in globals() else {name})"
    tests = []
    for given, expected in zip(inputs, outputs):
        arguments = given
        if isinstance(given, str):
            lines = [line for line in given.splitlines() if line.strip()]
            arguments = [_json(line, "each line of inputs") for line in lines]
        result = expected
        if isinstance(expected, str):
            result = _json(expected, "outputs")
        tests.append(f"assert {find}(*{_plain(arguments)!r}) in {_right_results(result)!r}")
    return tests


def _right_results(expected: Any) -> list[Any]:
    """Return the values that count as an expected result, as in the tests of APPS.

    APPS and TACO write a result alone or as a list of one. JSON has no tuples, so a tuple is as
    good as a list. They are listed here, because the program may redefine `list`.
    """
    right = [_plain(expected)]
    if _is_list(expected) and len(expected) == 1:
        right.append(_plain(expected[0]))
    return right + [tuple(value) for value in right if isinstance(value, list)]


def _json(text: str, part: str) -> Any:
    """Return the value of a part of the ground truth. Raises RewardError for a text not in JSON."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise RewardError(
            f"The code rule expects JSON in {part}, got {text[:200]!r} ({error}). Correct the data."
        ) from error


def _plain(value: Any) -> Any:
    if _is_list(value):
        return [_plain(entry) for entry in value]
    return value.item() if hasattr(value, "item") else value


def _by_output(
    runner: CodeRunner,
    code: str,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    *,
    stop_early: bool,
) -> tuple[list[bool], bool]:
    verdicts = []
    late = False
    for given, expected in zip(inputs, outputs):
        run = runner.run(code, [], stdin=_joined(given))
        is_right = run.status == "finished" and _lines(run.output) == _lines(_joined(expected))
        verdicts.append(is_right)
        late |= run.status == "timeout"
        if stop_early and not is_right:
            break
    return verdicts, late


def _joined(text: Any) -> str:
    """Return a text that may be given as the list of its lines, as some rows of TACO do."""
    return "\n".join(map(str, text)) if _is_list(text) else str(text)


def _lines(text: str) -> list[str]:
    """Return the lines to compare, without blanks at their ends and around the text."""
    return [line.rstrip() for line in text.strip().splitlines()]
