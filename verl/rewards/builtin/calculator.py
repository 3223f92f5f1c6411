"""The packaged calculator set: a whole number behind "####", or else the last one of the text."""

import re
from typing import Any

from verl.rewards.registry import answer_extractors, reward_rules
from verl.utils.json_text import whole_number

_WHOLE_NUMBER = re.compile(r"-?\d+(?:,\d{3})*")


@answer_extractors.register("calculator")
def extract_answer(text: str) -> str | None:
    """Return the first whole number behind the last "####", or else the last one; None without."""
    _, mark, rest = text.rpartition("####")
    numbers = _WHOLE_NUMBER.findall(rest)
    if not numbers:
        return None
    written = numbers[0] if mark else numbers[-1]
    number = whole_number(written.replace(",", ""))
    return None if number is None else str(number)


@reward_rules.register("calculator")
def score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1 when the answer is exactly the ground truth, else 0."""
    answer = extract_answer(solution_str)
    return float(answer is not None and answer == str(ground_truth).strip())
