"""Countdown: reach a target with the four operations and the given numbers."""

import ast
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from verl.rewards.builtin.search_qa import extract_answer
from verl.rewards.registry import answer_extractors, reward_rules
from verl.utils.errors import RewardError

# No task has equations as long as this; the bound keeps hostile input from costing time or stack.
MAX_EQUATION_CHARACTERS = 500

_SOURCES = ("countdown*", "Jiayi-Pan/Countdown-Tasks-*")
_SPELLINGS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*"})


@answer_extractors.register(*_SOURCES)
def extract_equation(text: str) -> str | None:
    """What stands between the last `<answer>` tags, without a right-hand side such as "= 24"; None
    without tags."""
    answer = extract_answer(text)
    return None if answer is None else answer.translate(_SPELLINGS).split("=")[0].strip()


def evaluate(equation: str) -> tuple[Fraction, list[int]] | None:
    """Exact value of an equation of integers, + - * / and brackets, with the numbers it uses; None
    if it is not one."""
    if len(equation) > MAX_EQUATION_CHARACTERS:
        return None
    numbers: list[int] = []
    try:
        # The parser alone runs on the model's text; nothing of it is ever executed.
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
    """Target and numbers of a row: a mapping, or the same as JSON text."""
    task = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    numbers = task.get("numbers", task.get("nums")) if isinstance(task, Mapping) else None
    if not isinstance(task, Mapping) or "target" not in task or not isinstance(numbers, Iterable):
        raise RewardError(
            f"The countdown rule expects ground_truth = {{'target': 24, 'numbers': [3, 8, 1]}}, "
            f"got {ground_truth!r}."
        )
    return Fraction(str(task["target"])), [int(number) for number in numbers]


@reward_rules.register(*_SOURCES)
def score(
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    use_all: bool = True,
    format_score: float = 0.0,
) -> float:
    """1 when the equation in the last `<answer>` reaches the target with the given numbers, else 0.

    Args:
        ground_truth: {"target": ..., "numbers": [...]}.
        use_all: every number exactly once (the usual task); False: every number at most once.
        format_score: what an arithmetic equation gets that uses wrong numbers or misses the target.
    """
    target, given = _task(ground_truth)
    equation = extract_equation(solution_str)
    result = evaluate(equation) if equation else None
    if result is None:
        return 0.0
    value, used = result
    allowed = Counter(used) == Counter(given) if use_all else Counter(used) <= Counter(given)
    return 1.0 if allowed and value == target else format_score
