"""A batch with its rewards: scores, metrics, and readable rows."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.config import TrainConfig
from verl.protocol import DataProto
from verl.rewards.results import ground_truth_of, without_nan
from verl.trainer.rows import counted_rows
from verl.utils.column_dicts import object_column
from verl.utils.errors import AlgorithmError, RewardError
from verl.utils.logging import say_once
from verl.utils.user_parts import describe_value

# Columns of `sample_rows` that are no fields of the reward.
COLUMNS = ("uid", "data_source", "input", "output", "gts", "score")
NUMBERS = (int, float, np.integer, np.floating, np.bool_)


def record_scores(batch: DataProto, result: dict[str, Any], *, may_fail: bool = False) -> None:
    """Write a reward manager's result into the batch: the scores, the extra fields as object
    columns.

    A dropped sample loses its response mask, and with it every part in the update. An extra field
    never replaces a column that is there already, such as `uid`: it stays out. Raises RewardError
    where all samples were dropped, unless they `may_fail`.

    Args:
        batch: (B,) trajectories.
        result: of `verl.rewards.results.call_reward`, as for the functions below.
        may_fail: whether a batch without a score is taken.
    """
    batch.batch["token_level_scores"] = result["reward_tensor"]
    kept = batch.meta_info["reward_fields"] = list[str]()

    for name, values in result["reward_extra_info"].items():
        if name in batch.non_tensor_batch or name in batch.batch.keys():
            say_once(
                f"The reward's field '{name}' has the name of a column and is not kept.",
                logging.WARNING,
            )
            continue
        batch.non_tensor_batch[name] = object_column(values)
        kept.append(name)

    dropped = result["dropped"]
    if len(dropped) == len(batch) and not may_fail:
        raise nothing_scored("this step")
    batch.batch["response_mask"][dropped] = 0


def require_floats(batch: DataProto, name: str, phase: str) -> None:
    """Raise AlgorithmError unless a phase, of a user's own perhaps, has written floats (B, R)."""
    if not isinstance(batch, DataProto):
        raise AlgorithmError(f"`{phase}` must return its batch, got {type(batch).__name__}.")
    column = batch.batch.get(name, None)
    shape = batch.batch["response_mask"].shape
    if column is None or column.shape != shape or not column.is_floating_point():
        raise AlgorithmError(
            f"`{phase}` must write the column '{name}', floats of shape {tuple(shape)} (rows, "
            f"response tokens), got {describe_value(column)}."
        )


def nothing_scored(part: str, failures: Sequence[str] = ()) -> RewardError:
    """Return the error of a step or validation, `part`, in which no sample has a score.

    Args:
        part: its name.
        failures: causes of failed episodes.
    """
    if failures:
        return RewardError(
            f"No sample of {part} has a score, and {len(failures)} episodes failed. The first: "
            f"{failures[0].rstrip('.')}. Fix the tools, the environment or the agent loop."
        )
    return RewardError(
        f"All samples of {part} were dropped: the reward function failed for each of them. Fix the "
        "reward function (the warning above names the first failure), or set "
        "reward_model.on_error=zero or stop."
    )


def reward_metrics(
    result: dict[str, Any], counted: Sequence[int] | None = None
) -> dict[str, float]:
    """Count failed rewards and average every numeric extra field over the samples that have it.

    Args:
        counted: rows that are averaged; None: all.
    """
    metrics: dict[str, float] = dict(result["metrics"])
    for name, values in result["reward_extra_info"].items():
        rows = range(len(values)) if counted is None else counted
        numbers = numbers_of({row: values[row] for row in rows})
        if numbers:
            metrics[f"reward/{name}/mean"] = sum(numbers.values()) / len(numbers)
    return metrics


def numbers_of(values: Mapping[int, Any]) -> dict[int, float]:
    """Return the numbers among the values of a field, by sample.

    None and NaN stand for an absent value. Returns none where any other value is no number.
    """
    numbers = {}
    for sample, value in values.items():
        if value is None:
            continue
        if not isinstance(value, NUMBERS):
            return {}
        if not math.isnan(value):
            numbers[sample] = float(value)
    return numbers


def vote(answer: Any) -> str | None:
    """Return the form in which an extracted answer counts in a majority.

    Anything may be an answer, also a list; None and NaN are none.
    """
    given = without_nan(answer)
    return None if given is None else str(given)


def scored_rows(
    batch: DataProto, tokenizer: Any, result: Mapping[str, Any], config: TrainConfig
) -> list[dict]:
    """Return `sample_rows` of the trajectories that have a reward."""
    rows = sample_rows(batch, tokenizer, result["reward_extra_info"], config)
    dropped = set(result["dropped"])
    return [row for number, row in enumerate(rows) if number not in dropped]


def recorded_rows(batch: DataProto, tokenizer: Any, config: TrainConfig) -> list[dict]:
    """Return `sample_rows` with the fields of the reward that `record_scores` has written.

    The score of a dropped sample is None.
    """
    names = batch.meta_info.get("reward_fields", ())
    extra = {name: batch.non_tensor_batch[name] for name in names}
    rows = sample_rows(batch, tokenizer, extra, config)
    for row, counts in zip(rows, counted_rows(batch).tolist()):
        if not counts:
            row["score"] = None
    return rows


def sample_rows(
    batch: DataProto, tokenizer: Any, extra: Mapping[str, Any], config: TrainConfig
) -> list[dict]:
    """Return one readable dict per trajectory: the `COLUMNS`, and fields of the reward."""
    columns = batch.batch
    source_key = config.data.reward_fn_key
    width = columns["prompts"].shape[1]
    mask = columns["attention_mask"].bool()
    scores = columns["token_level_scores"].sum(-1).tolist()
    unknown = np.full(len(batch), "unknown", dtype=object)
    sources = batch.non_tensor_batch.get(source_key, unknown)
    rules = batch.non_tensor_batch.get("reward_model", [None] * len(batch))

    rows = []
    for i in range(len(batch)):
        row = {
            "uid": batch.non_tensor_batch["uid"][i],
            "data_source": sources[i],
            "input": tokenizer.decode(columns["prompts"][i][mask[i, :width]]),
            "output": tokenizer.decode(columns["responses"][i][mask[i, width:]]),
            "gts": ground_truth_of(rules[i]),
            "score": scores[i],
        }
        for name, values in extra.items():
            row.setdefault(name, values[i])
        rows.append(row)

    return rows


def fields_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the fields of the reward in `sample_rows`, a list for each; None where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row if name not in COLUMNS)
    return {name: [row.get(name) for row in rows] for name in names}
