"""The score of one response by the rule of its data source."""

from collections.abc import Mapping
from typing import Any

from verl.rewards.builtin import countdown, gsm8k, math, toy
from verl.rewards.registry import Rule, reward_rules
from verl.utils.errors import RewardError
from verl.utils.registry import nearest_names

__all__ = ["countdown", "default_compute_score", "find_rule", "gsm8k", "math", "toy"]


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    **options: Any,
) -> float | dict[str, Any]:
    """Score `solution_str` by the rule registered for `data_source`.

    Args:
        data_source: name or prefix under which a rule is registered.
        solution_str: the decoded response.
        ground_truth: what the rule compares with; its form depends on the rule.
        extra_info: the row's `extra_info`, handed to the rule.
        options: settings of that rule, such as `method="flexible"` of gsm8k.

    Raises:
        RewardError: the data source has no rule, or the row has no ground truth.
    """
    rule = find_rule(data_source)
    if ground_truth is None:
        raise RewardError(
            f"The rule for data_source '{data_source}' needs reward_model.ground_truth, but this row has none. Add the "
            "column reward_model = {'style': 'rule', 'ground_truth': ...} to the data."
        )
    return rule(solution_str, ground_truth, extra_info, **options)


def find_rule(data_source: Any) -> Rule:
    """The rule of a data source, or a RewardError that names the known ones and the way to one's own."""
    if not isinstance(data_source, str) or data_source not in reward_rules:
        known = ", ".join(sorted(reward_rules))
        if data_source is None:
            fact = "The rows have no data_source, which picks the reward rule"
        else:
            near = nearest_names(str(data_source), list(reward_rules))
            fact = f"No reward rule for data_source {data_source!r}" + (f". Nearest: {near}" if near != known else "")
        raise RewardError(
            f"{fact}. Known: {known} (* stands for any ending). Name your own function with "
            "custom_reward_function.path, or register a rule with verl.rewards.registry.reward_rules."
        )
    return reward_rules.get(data_source)
