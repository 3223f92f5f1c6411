"""Checks whether a configuration can be honoured, before a weight is loaded."""

import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

from verl.config.keys import (
    Key,
    is_changed,
    is_inherited,
    keys_of,
    keys_of_entries,
    value_at,
    written,
)
from verl.config.placement import inactive_sections
from verl.config.rule_table import Messages
from verl.config.rules import RULES, Rule, doubtful
from verl.config.train import TrainConfig
from verl.utils.errors import ConfigError
from verl.utils.logging import logger
from verl.utils.registry import nearest_names


def validate(
    config: Any,
    rules: Iterable[Rule] = RULES,
    doubts: Callable[[Any], Iterable[str]] = doubtful,
    *,
    only_to_plan: bool = False,
) -> None:
    """Raise one ConfigError with every contradiction, and log changed keys without effect.

    Args:
        config: a configuration of any root.
        rules: rules of its root, by default those of TrainConfig.
        doubts: doubts of its root, by default those of TrainConfig.
        only_to_plan: log features that this version lacks, because nothing will run.
    """
    problems = contradictions(config, rules, only_to_plan=only_to_plan)
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} problems in the configuration:\n{listed}")

    if only_to_plan:
        for message in _not_available(config):
            logger.warning("%s The plan takes it so; a run would end here.", message)
    for warning in (*_without_effect(config), *doubts(config)):
        logger.warning(warning)


def contradictions(
    config: Any, rules: Iterable[Rule] = RULES, *, only_to_plan: bool = False
) -> list[str]:
    """Return one message for each value that cannot be honoured; see `validate`."""
    problems: list[str] = []
    for key in (*_keys_with_limits(type(config)), *keys_of_entries(config)):
        problems += _problems_of_value(config, key)
    if problems:
        return problems

    # Rules take it that every single value is in its range.
    if not only_to_plan:
        problems += _not_available(config)
    for rule in rules:
        problems += rule(config)
    return problems


@functools.cache
def _keys_with_limits(root: type) -> list[Key]:
    """Return the keys with a value that can be wrong by itself."""
    found = []
    for key in keys_of(root).values():
        has_choices = key.setting.choices is not None
        is_free = key.type in (bool, str, str | None) and not key.setting.is_path
        if has_choices or not is_free:
            found.append(key)
    return found


def _problems_of_value(config: TrainConfig, key: Key) -> Messages:
    """Yield faults of one value by itself: not among the choices, or out of range."""
    value = value_at(config, key.path)
    setting = key.setting
    if value is None or is_inherited(config, key, value):
        return

    entries = value if isinstance(value, list) else [value]
    if setting.is_path and value != key.default and "" in entries:
        yield (
            f"{key.path} has an empty path, as an unset variable of the shell leaves it. Give a "
            "path, or null for none."
        )
        return

    if setting.choices is not None and value not in setting.choices:
        if key.path.endswith("strategy") and "megatron" in str(value):
            rollout = "."
            if isinstance(config, TrainConfig):
                rollout = (
                    ", and actor_rollout_ref.rollout.tensor_model_parallel_size splits the rollout."
                )
            yield (
                f"{key.path}={value}: there is no Megatron backend. Set {key.path}=fsdp: FSDP2 "
                f"shards weights, gradients and moments{rollout}"
            )
            return
        near = nearest_names(str(value), list(setting.choices))
        yield (
            f"{key.path}: unknown value '{value}'. Nearest known: {near}. All: "
            f"{', '.join(setting.choices)}."
        )

    if (bounds := _violated_bounds(key, value)) is not None:
        # A number such as -1 may be meant for "no limit", which is null: its help line says so.
        or_null = f" Or give null ({setting.help})." if key.default is None else ""
        yield f"{key.path} must be {bounds}, got {value}.{or_null}"
    elif any(isinstance(number, float) and math.isnan(number) for number in entries):
        yield f"{key.path} must be a number, got {value}."


def _not_available(config: Any) -> Messages:
    """Yield features that are asked for in active sections and not available."""
    unread = inactive_sections(config) if isinstance(config, TrainConfig) else ()
    for key in keys_of(type(config)).values():
        value = value_at(config, key.path)
        reason = key.setting.planned
        if reason is None or not is_changed(config, key, value):
            continue
        if not key.path.startswith(unread):
            default = written(key.default)
            yield (
                f"{key.path}={value} is not available in this version: {reason}. Set "
                f"{key.path}={default}."
            )


def _violated_bounds(key: Key, value: Any) -> str | None:
    """Return the range of the key if `value` lies outside of it."""
    setting = key.setting
    parts = []
    inside = True
    for words, bound, holds in (
        ("above", setting.above, operator.gt),
        ("at least", setting.at_least, operator.ge),
        ("at most", setting.at_most, operator.le),
    ):
        if bound is not None:
            parts.append(f"{words} {bound}")
            inside &= holds(value, bound)

    if setting.finite:
        parts.append("finite")
        inside &= not math.isinf(value)
    return None if inside else " and ".join(parts)


def _without_effect(config: Any) -> Messages:
    for key in keys_of(type(config)).values():
        value = value_at(config, key.path)
        reason = key.setting.no_effect
        if reason is not None and is_changed(config, key, value):
            yield f"{key.path}={written(value)} has no effect: {reason}."
