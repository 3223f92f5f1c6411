"""Reward functions in a module that imports within milliseconds."""

import time
from typing import Any


def fails_or_sleeps(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    """Raise, or never return, as the response says."""
    if solution_str == "raises":
        raise ValueError("unlucky")
    if solution_str == "sleeps":
        time.sleep(600)
    return 1.0
