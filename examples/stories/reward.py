"""The reward of the stories example, for `custom_reward_function.path`."""

import re
from collections.abc import Sequence
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Sequence[str], extra_info: Any = None
) -> float:
    """Return the share of the words of `ground_truth` that occur in the response, in any case."""
    words = set(re.findall(r"[a-z]+", solution_str.lower()))
    return sum(word in words for word in ground_truth) / len(ground_truth)
