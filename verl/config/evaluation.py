"""The configuration tree of `verl.trainer.main_eval`."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.file_rules import output_is_no_input
from verl.config.reward import (
    CustomRewardFunctionConfig,
    RewardFunctionConfig,
)
from verl.config.reward_rules import reward_has_what_it_needs
from verl.config.rule_table import Rows, table
from verl.config.setting import setting
from verl.config.shared_keys import SharedKeys

_NO_RAY = (
    "rewards are called without Ray; reward_model.reward_manager=prime calls them in processes"
)


@dataclass(kw_only=True, slots=True)
class EvaluationDataConfig:
    path: Any = setting(
        None,
        "file or list of files that main_generation wrote, or others like them",
        many=True,
        is_path=True,
    )
    prompt_key: str = setting("prompt", "column that holds the messages; errors show them")
    response_key: str = setting("responses", "column with the list of responses to each prompt")
    data_source_key: str = setting(
        "data_source", "column that picks the reward rule, and the line of the table"
    )
    reward_model_key: str = setting("reward_model", "column with {ground_truth: ...}")
    extra_info_key: str = setting(
        "extra_info", "column that the reward function gets as extra_info"
    )
    output_path: str | None = setting(
        None, "JSON file to write; null: the table alone", is_path=True
    )


@dataclass(kw_only=True, slots=True)
class EvaluationRewardConfig(RewardFunctionConfig):
    reward_manager: str = setting(
        "naive",
        "naive: one call a response; batch: one for many; prime: calls in processes",
        choices=("naive", "batch", "prime"),
    )


@dataclass(kw_only=True, slots=True)
class MetricsConfig:
    k: list[int] = setting(
        [], "k of pass@k and maj@k; empty: 1, 2, 4 ... and the number of responses"
    )
    pass_score: float = setting(
        1.0,
        (
            "score from which a response passes, where the reward function returns no field `acc` "
            "that says so"
        ),
    )
    confidence: float = setting(0.95, "level of the confidence intervals", above=0, at_most=0.9999)
    resamples: int = setting(2000, "bootstrap samples of the prompts", above=0)
    seed: int = setting(0, "seed of the bootstrap", at_least=0)


@dataclass(kw_only=True, slots=True)
class EvaluationRayConfig:
    num_cpus: int | None = setting(None, "CPU cores for Ray", no_effect=_NO_RAY)
    timeline_json_file: str | None = setting(None, "file for Ray's timeline", no_effect=_NO_RAY)


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    data: EvaluationDataConfig = field(default_factory=EvaluationDataConfig)
    custom_reward_function: CustomRewardFunctionConfig = field(
        default_factory=CustomRewardFunctionConfig
    )
    reward_model: EvaluationRewardConfig = field(default_factory=EvaluationRewardConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    ray_init: EvaluationRayConfig = field(default_factory=EvaluationRayConfig)


@table
def responses_are_named(config: EvaluationConfig) -> Rows:
    return (
        (
            not config.data.path,
            "data.path is not set. Give a file with responses, such as main_generation writes.",
        ),
        (
            min(config.metrics.k, default=1) < 1,
            "metrics.k must be numbers of at least 1, got {metrics.k}.",
        ),
    )


SHARED = SharedKeys((("data.data_source_key", "data.reward_fn_key"),))
RULES = (responses_are_named, output_is_no_input, SHARED.rule_here(reward_has_what_it_needs))
