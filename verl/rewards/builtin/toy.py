"""The packaged toy set: the response is the answer and nothing else."""

from typing import Any

from verl.rewards.registry import answer_extractors, reward_rules

answer_extractors.register("toy")(str.strip)


@reward_rules.register("toy")
def score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1 when the response without surrounding blanks equals the ground truth, else 0."""
    return float(solution_str.strip() == str(ground_truth).strip())
