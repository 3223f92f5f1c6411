"""The packaged sets toy and shapes: the response must be exactly the answer."""

from typing import Any

from verl.rewards.registry import answer_extractors, reward_rules

_SOURCES = ("toy", "shapes")

answer_extractors.register(*_SOURCES)(str.strip)


@reward_rules.register(*_SOURCES)
def score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1 if the response without surrounding blanks equals the ground truth, else 0."""
    return float(solution_str.strip() == str(ground_truth).strip())
