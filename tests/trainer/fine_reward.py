"""A reward that distinguishes nearly all responses, so that no two runs look alike by chance."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
) -> float:
    """Return 1 for the right answer, plus a small amount that depends on its characters."""
    return float(solution_str.strip() == ground_truth) + (sum(map(ord, solution_str)) % 97) / 970
