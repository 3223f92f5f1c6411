"""Reward functions in a module that a process imports within milliseconds."""

import time
from typing import Any


def fails_or_sleeps(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    """Raise, or never answer, where the response says so."""
    if solution_str == "raises":
        raise ValueError("unlucky")
    if solution_str == "sleeps":
        time.sleep(600)
    return 1.0
