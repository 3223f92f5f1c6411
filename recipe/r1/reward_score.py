"""The reward function of verl's R1 recipe: the rules by data source, and the recipe's names of sets
with them."""

from collections.abc import Mapping
from typing import Any

from verl.rewards.registry import answer_extractors, reward_rules
from verl.rewards.rules import default_compute_score, math

for _source in ("Maxwell-Jia/AIME_2024", "opencompass/cnmo2024_en", "opencompass/cnmo2024_zh"):
    reward_rules.register(_source)(math.score)
    answer_extractors.register(_source)(math.last_boxed)


def reward_func(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> float | dict[str, Any]:
    """Score `solution_str` by the rule of its data source, openai/gsm8k among them; see
    `default_compute_score`."""
    return default_compute_score(data_source, solution_str, ground_truth, extra_info)
