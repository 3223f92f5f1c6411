"""Check the results of reward functions and managers, and read the data that they get."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.protocol import DataProto
from verl.rewards.fields import fault_of, shown
from verl.rewards.outcome import Outcome
from verl.rewards.texts import describe_briefly, on_one_line
from verl.utils.errors import ConfigError, RewardError
from verl.utils.user_parts import NamedPart

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


def call_reward(reward_fn: Callable[..., Any], batch: DataProto) -> dict[str, Any]:
    """Score B responses with a reward manager, or with a function of a program.

    Returns the `checked_result`. Raises RewardError for a wrong one, and with the name, file and
    line of a function that raised.
    """
    name = getattr(reward_fn, "__qualname__", type(reward_fn).__name__)
    with NamedPart("reward", name, reward_fn, RewardError).naming_errors():
        result = reward_fn(batch, return_dict=True)
    return checked_result(result, batch.batch["responses"])


def checked_result(result: Any, responses: Tensor) -> dict[str, Any]:
    """Return a manager's result under `return_dict`, in one form.

    Returns:
        A dict: "reward_tensor", (B, R) float32 without a gradient, on the device of `responses`;
        "reward_extra_info", name -> list of B; "metrics", name -> float; "dropped", row numbers.

    Raises:
        RewardError: the scores are not finite, too large for advantages, or no floats of shape
            (B, R), a field does not have one allowed value for each response, a metric is no
            number, or a dropped row is none of the batch.
    """
    scores = _scores_in(result, responses)
    fields = {}
    for name, values in _named_entries(result, "reward_extra_info", "lists of B values").items():
        fields[name] = _checked_field(name, values, len(responses))

    metrics = {}
    for name, value in _named_entries(result, "metrics", "numbers").items():
        if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) == 1:
            value = value.item()
        if not isinstance(value, Real):
            raise RewardError(
                f"The reward's metric '{name}' must be a number, got {shown(value)} of type "
                f"{type(value).__name__}. One value for each response belongs into "
                "reward_extra_info."
            )
        metrics[name] = float(value)

    return {
        "reward_tensor": scores.detach().to(responses.device, torch.float32),
        "reward_extra_info": fields,
        "metrics": metrics,
        "dropped": _dropped_rows(result, len(responses)),
    }


def _scores_in(result: Any, responses: Tensor) -> Tensor:
    """Return the (B, R) scores of a result, after a check of each."""
    tensor = result.get("reward_tensor") if isinstance(result, Mapping) else None
    if (
        not isinstance(tensor, Tensor)
        or not tensor.is_floating_point()
        or tensor.shape != responses.shape
    ):
        got = result if tensor is None else tensor
        if isinstance(result, Tensor):
            found = f"a tensor of shape {tuple(result.shape)} without the dict"
        elif isinstance(got, Tensor):
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
    return tensor


def _named_entries(result: Mapping[str, Any], key: str, contents: str) -> Mapping[str, Any]:
    """Return the dict under a key of a result, empty where it has none."""
    entries = result.get(key, {})
    if isinstance(entries, Mapping) and all(isinstance(name, str) for name in entries):
        return entries
    raise RewardError(
        f"The reward's {key} must be a dict of {contents} by name, got {shown(entries)}. Leave it "
        "out where there are none."
    )


def _checked_field(name: str, values: Any, num_responses: int) -> list[Any]:
    """Return the B values of a field as a list; those of a tensor are Python's own."""
    if isinstance(values, Tensor) and values.ndim:
        values = values.tolist()
    is_column = isinstance(values, Collection) and not isinstance(values, str | bytes | Mapping)
    found = len(values) if is_column else shown(values)
    if found != num_responses:
        raise RewardError(
            f"The reward's field '{name}' must have one entry for each of {num_responses} "
            f"responses, got {found}."
        )

    for row, value in enumerate(values):
        if fault := fault_of(value):
            raise RewardError(f"The reward's field '{name}' of row {row} {fault}")
    return list(values)


def _dropped_rows(result: Mapping[str, Any], num_responses: int) -> list[int]:
    """Return the numbers of the dropped rows, each one of the batch."""
    dropped = result.get("dropped", ())
    if isinstance(dropped, Tensor | np.ndarray):
        dropped = dropped.tolist()
    if not isinstance(dropped, Collection):
        raise RewardError(f"The reward's dropped must be a list of rows, got {shown(dropped)}.")

    unknown = [row for row in dropped if row not in range(num_responses)]
    if unknown:
        raise RewardError(
            f"The reward's dropped rows must be among the {num_responses} of the batch, from 0, "
            f"got {unknown[0]}."
        )
    return [int(row) for row in dropped]


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
