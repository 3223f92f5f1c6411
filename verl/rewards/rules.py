"""Score a response by the rule of its data source."""

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from verl.rewards.builtin import calculator, choice, code, countdown, gsm8k, math, search_qa, toy
from verl.rewards.outcome import RewardFunction
from verl.rewards.registry import Rule, reward_rules
from verl.rewards.sandbox.runner import CodeRunner, default_runner
from verl.utils.errors import ConfigError, RewardError
from verl.utils.registry import nearest_names
from verl.utils.signatures import takes_any_keyword

__all__ = [
    "calculator",
    "choice",
    "code",
    "countdown",
    "default_compute_score",
    "find_rule",
    "gsm8k",
    "math",
    "scores_by_rule",
    "search_qa",
    "toy",
]

_WITHOUT_RULE = (
    "score by a function of your own (custom_reward_function.path) or a rule that you register "
    "(verl.rewards.registry.reward_rules). Rules exist for openai/gsm8k, math, countdown, "
    "multiple_choice, nq, humaneval, mbpp and others (docs/reference/rewards.md)."
)


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    runner: CodeRunner | None = None,
    **options: Any,
) -> float | dict[str, Any]:
    """Score `solution_str` by the rule registered for `data_source`.

    Args:
        data_source: name or prefix under which a rule is registered.
        solution_str: the decoded response.
        ground_truth: the reference for the rule; its form depends on the rule.
        extra_info: the row's `extra_info`, passed to the rule.
        runner: runner for rules that execute code; None: the sandbox of this machine.
        options: settings of that rule, such as `method="flexible"` of gsm8k.

    Raises:
        RewardError: the data source has no rule, or the row has no ground truth.
    """
    rule = find_rule(data_source)
    require_truth(data_source, ground_truth)
    if runner is not None and runs_code(rule):
        options["runner"] = runner
    return rule(solution_str, ground_truth, extra_info, **options)


def require_truth(data_source: str, ground_truth: Any) -> None:
    """Raise RewardError if a row has no ground truth for its rule, or one that equals no text."""
    if ground_truth is None:
        raise RewardError(
            f"The rule for data_source '{data_source}' needs reward_model.ground_truth, but this "
            "row has none. Add the column reward_model = {'style': 'rule', 'ground_truth': ...} to "
            "the data."
        )
    if isinstance(ground_truth, bytes):
        raise RewardError(
            f"The rule for data_source '{data_source}' compares texts, but "
            f"reward_model.ground_truth is bytes: {ground_truth!r:.80}. Decode it: "
            "ground_truth.decode()."
        )


def scores_by_rule(function: RewardFunction) -> bool:
    """Return whether a reward function is `default_compute_score`, with or without options."""
    return getattr(function, "func", function) is default_compute_score


def runs_code(rule: Rule) -> bool:
    """Return whether a rule takes `runner=`."""
    return getattr(rule, "runs_code", False)


def calls_at_once(function: RewardFunction, data_sources: Iterable[Any]) -> int:
    """Return the largest number of concurrent calls.

    It is one, unless the function or the runner of code allows more by `max_concurrent`.
    """
    if not scores_by_rule(function):
        return int(getattr(function, "max_concurrent", 1))
    if not any(runs_code(find_rule(source)) for source in data_sources):
        return 1
    runner = getattr(function, "keywords", {}).get("runner") or default_runner()
    return runner.max_concurrent


def with_options(options: Mapping[str, Any], runner: CodeRunner | None) -> RewardFunction:
    """Bind `default_compute_score` to a run's `reward_model.rule_kwargs` and CodeRunner."""
    given = dict(options)
    if runner is not None:
        given["runner"] = runner
    return functools.partial(default_compute_score, **given) if given else default_compute_score


def check_options(data_source: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that the rule of this data source does not take."""
    rule = find_rule(data_source)
    if takes_any_keyword(rule):
        return
    # The first three are given by position.
    known = [name for name in list(inspect.signature(rule).parameters)[3:] if name != "runner"]
    for name in options:
        if name not in known:
            raise ConfigError(
                f"reward_model.rule_kwargs.{name}: the rule of data_source {data_source!r} takes "
                f"{', '.join(known) or 'no options'}."
            )


def require_rules(sources: Iterable[tuple[str, Any]]) -> None:
    """Raise RewardError for the first (place, data source) without a rule."""
    with_rule = set()
    for place, source in sources:
        if source in with_rule:
            continue
        try:
            find_rule(source)
        except RewardError as error:
            raise RewardError(f"{place}: {error}") from error
        with_rule.add(source)


def require_truths(rows: Iterable[tuple[str, Any, Any]]) -> None:
    """Raise RewardError for the first (place, data source, ground truth) that no rule can use."""
    for place, source, truth in rows:
        try:
            require_truth(source, truth)
        except RewardError as error:
            raise RewardError(f"{place}: {error}") from error


def find_rule(data_source: Any) -> Rule:
    """Return the rule of a data source.

    Raises RewardError, with the nearest sources that have one, if it has none.
    """
    if data_source in reward_rules:
        return reward_rules.get(data_source)

    if data_source is None:
        raise RewardError(
            "There is no data_source, which picks the reward rule. Add the column "
            f"(data.reward_fn_key names another one), or {_WITHOUT_RULE}"
        )
    known = list(reward_rules)
    near = nearest_names(str(data_source), known)
    hint = "" if near == ", ".join(sorted(known)) else f" Nearest: {near}."
    raise RewardError(
        f"No reward rule for data_source {data_source!r}.{hint} Correct it, or {_WITHOUT_RULE}"
    )
