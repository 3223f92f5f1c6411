"""A reward that tells nearly every response from every other, so that no two runs look alike by
luck."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """1 for the right answer, and a little for which characters it is made of."""
    return float(solution_str.strip() == ground_truth) + (sum(map(ord, solution_str)) % 97) / 970
