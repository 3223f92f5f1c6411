"""Countdown: reach a target with the four operations and the given numbers."""

import ast
from collections import Counter
from fractions import Fraction
from typing import Any

from verl.rewards.builtin.search_qa import extract_answer
from verl.rewards.registry import answer_extractors, reward_rules
from verl.utils.errors import RewardError
from verl.utils.json_text import parse_json

# No task has equations of this length; the bound limits the time and stack that hostile input uses.
MAX_EQUATION_CHARACTERS = 500

_SOURCES = ("countdown*", "Jiayi-Pan/Countdown-Tasks-*")
_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*"})


@answer_extractors.register(*_SOURCES)
def extract_equation(text: str) -> str | None:
    """Return the text between the last `<answer>` tags, without a right-hand side such as "= 24".

    Returns None if there are no tags.
    """
    answer = extract_answer(text)
    if answer is None:
        return None
    return answer.translate(_SPELLINGS).split("=")[0].strip()


def evaluate(equation: str) -> tuple[Fraction, list[int]] | None:
    """Return the exact value of an equation of integers, and the numbers that it uses.

    Returns None for text other than integers, + - * / and brackets.
    """
    if len(equation) > MAX_EQUATION_CHARACTERS:
        return None
    numbers: list[int] = []
    try:
        # Only the parser reads the model's text; it is never executed.
        return _value(ast.parse(equation, mode="eval").body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            numbers.append(number)
            return Fraction(number)

        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, numbers)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, numbers)

        case ast.BinOp(left=left, op=op, right=right):
            a = _value(left, numbers)
            b = _value(right, numbers)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div():
                    return a / b

    raise ValueError(f"not arithmetic: {ast.dump(node)}")


def _task(ground_truth: Any) -> tuple[Fraction, list[int]]:
    """Return target and numbers of a row's ground truth: a mapping, or the same as JSON text."""
    try:
        task = parse_json(ground_truth) if isinstance(ground_truth, str) else ground_truth
        numbers = task["numbers"] if "numbers" in task else task["nums"]
        return Fraction(str(task["target"])), [int(number) for number in numbers]
    except (KeyError, TypeError, ValueError) as error:
        raise RewardError(
            f"The countdown rule expects ground_truth = {{'target': 24, 'numbers': [3, 8, 1]}}, or "
            f"the same as JSON text, got {ground_truth!r:.200}. Correct the row."
        ) from error


@reward_rules.register(*_SOURCES)
def score(
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    use_all: bool = True,
    format_score: float = 0.0,
) -> float:
    """Return 1 if the equation in the last `<answer>` reaches the target with the given numbers.

    Args:
        ground_truth: {"target": ..., "numbers": [...]}.
        use_all: every number exactly once (the usual task); False: every number at most once.
        format_score: score of an equation that uses wrong numbers or misses the target; text that
            is no equation scores 0.
    """
    target, given = _task(ground_truth)
    equation = extract_equation(solution_str)
    result = None
    if equation:
        result = evaluate(equation)
    if result is None:
        return 0.0

    value, used = result
    allowed = Counter(used) <= Counter(given)
    if use_all:
        allowed = Counter(used) == Counter(given)
    if allowed and value == target:
        return 1.0
    return format_score
