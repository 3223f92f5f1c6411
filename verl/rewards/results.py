"""Check the results of reward functions and managers, and read the data that they get."""

import math
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from verl.rewards.fields import fault_of, shown
from verl.rewards.outcome import Outcome
from verl.rewards.texts import describe_briefly, on_one_line
from verl.utils.errors import ConfigError, RewardError

# Advantages and their means are computed in float32: the squares of a million scores of this size
# still have a finite sum there.
_LARGEST_SCORE = 1e15
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


def ground_truth_of(reward_model: Any) -> Any:
    """Return the ground truth of an entry of `reward_model`; None if there is no such column.

    Data for a custom function need not have it. NaN is none: tables have it in empty cells.
    """
    if not isinstance(reward_model, Mapping):
        return None
    return without_nan(reward_model.get("ground_truth"))


def without_nan(value: Any) -> Any:
    """Return a value, or None in place of NaN."""
    is_nan = isinstance(value, float) and math.isnan(value)
    return None if is_nan else value


def check_result(result: Any, responses: Tensor) -> None:
    """Check that a manager's result under `return_dict` matches the (B, R) responses.

    Raises:
        RewardError: the scores are not finite, too large for advantages, or no floats of shape
            (B, R), a field does not have one allowed value for each response, or a dropped row is
            none of the batch.
    """
    tensor = result.get("reward_tensor") if isinstance(result, Mapping) else None
    if (
        not isinstance(tensor, Tensor)
        or not tensor.is_floating_point()
        or tensor.shape != responses.shape
    ):
        got = result if tensor is None else tensor
        if isinstance(got, Tensor):
            found = f"{got.dtype} of shape {tuple(got.shape)}"
        else:
            found = type(got).__name__
        raise RewardError(
            "The reward must be {'reward_tensor': ..., 'reward_extra_info': ...}, with one score "
            "for each token of the responses, a tensor of floats of shape "
            f"{tuple(responses.shape)}, got {found}."
        )

    largest = tensor.abs().amax(-1).tolist() if tensor.numel() else []
    for row, magnitude in enumerate(largest):
        if fault := _fault_of_score(magnitude):
            raise RewardError(f"The reward of row {row} is {magnitude:g}, {fault}.")

    for name, values in result.get("reward_extra_info", {}).items():
        found = len(values) if isinstance(values, Collection) else shown(values)
        if found != len(responses):
            raise RewardError(
                f"The reward's field '{name}' must have one entry for each of {len(responses)} "
                f"responses, got {found}."
            )
        for row, value in enumerate(values):
            if fault := fault_of(value):
                raise RewardError(f"The reward's field '{name}' of row {row} {fault}")

    unknown = sorted(set(result.get("dropped", ())).difference(range(len(responses))))
    if unknown:
        raise RewardError(
            f"The reward's dropped rows must be among the {len(responses)} of the batch, from 0, "
            f"got {unknown[0]}."
        )


def no_such_field(metric: str, returned: Iterable[str]) -> ConfigError:
    """Return the error for a metric of dynamic sampling that is no field of the reward."""
    return ConfigError(
        f"algorithm.filter_groups.metric='{metric}' is no field of the reward, which returns: "
        f'{", ".join(returned)}. Return it in addition to "score", or set '
        "algorithm.filter_groups.metric=score."
    )


class _NotAScore(Exception):
    """A function returned something else; the text describes it."""


def check_outcome(outcome: Outcome, timeout_s: float) -> tuple[float, dict[str, Any], str | None]:
    """Return the score, further fields, and the failure or None. A failed call scores 0."""
    if outcome.timed_out:
        return 0.0, {}, f"no answer within {timeout_s:g} s."
    if outcome.error is not None:
        return 0.0, {}, describe_briefly(outcome.error)
    try:
        return *_read_value(outcome.value), None
    except _NotAScore as error:
        fault = str(error)
    except Exception as error:  # noqa: BLE001  (a user's class: __float__, __le__, keys, ...)
        fault = f"{type(outcome.value).__name__}, which raised {describe_briefly(error)}"
    return 0.0, {}, f"it returned {fault}"


def _read_value(value: Any) -> tuple[float, dict[str, Any]]:
    """Return the score and further fields. Raises _NotAScore for any other value."""
    extra: dict[str, Any] = {}
    if isinstance(value, Mapping):
        extra = {str(name): entry for name, entry in value.items() if name != "score"}
        if "score" not in value:
            names = on_one_line(sorted(map(str, value)), 200)
            raise _NotAScore(f"a dict without 'score', with {names}.")
        value = value["score"]

    if isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, (Real, np.bool_)):
        fact = f"{shown(value)} of type {type(value).__name__}"
        raise _NotAScore(f"{fact}, not a number or a dict with 'score'.")
    if fault := _fault_of_score(value):
        raise _NotAScore(f"{shown(value)}, {fault}.")

    for name, entry in extra.items():
        if fault := fault_of(entry):
            raise _NotAScore(f"a dict, its field '{name[:100]}' {fault}")
    return float(value), extra


def _fault_of_score(score: Any) -> str | None:
    """Return why a number cannot be a score, or None."""
    # Compare before converting: float(10**400) raises. NaN compares false.
    if -_LARGEST_SCORE <= score <= _LARGEST_SCORE:
        return None
    if not -_LARGEST_FLOAT <= score <= _LARGEST_FLOAT:
        return "not a finite float32"
    return (
        f"in magnitude larger than {_LARGEST_SCORE:g}, beyond which advantages overflow in float32. "
        "Return a scaled or clipped score"
    )
