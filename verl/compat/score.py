"""`default_compute_score` with verl 0.5's parameters for a sandbox service."""

import contextlib
import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from verl.config import RewardModelConfig
from verl.rewards import rules
from verl.rewards.build import build_code_runner
from verl.rewards.sandbox.runner import CodeRunner


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: AbstractContextManager[Any] | None = None,
    memory_limit_mb: int | None = None,
    **options: Any,
) -> float | dict[str, Any]:
    """Score by `rules.default_compute_score`; run code by the service at `sandbox_fusion_url`.

    `concurrent_semaphore` is held during the call.
    """
    if sandbox_fusion_url is not None and rules.runs_code(rules.find_rule(data_source)):
        options["runner"] = _service(sandbox_fusion_url, memory_limit_mb)
    with concurrent_semaphore or contextlib.nullcontext():
        return rules.default_compute_score(
            data_source, solution_str, ground_truth, extra_info, **options
        )


# Like a functools.partial: managers then recognize that the rules score.
vars(default_compute_score)["func"] = rules.default_compute_score


@functools.cache
def _service(url: str, memory_limit_mb: int | None) -> CodeRunner | None:
    section = RewardModelConfig()
    section.sandbox_fusion.url = url
    section.sandbox_fusion.memory_limit_mb = (
        memory_limit_mb or section.sandbox_fusion.memory_limit_mb
    )
    return build_code_runner(section)
