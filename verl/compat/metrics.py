"""Metrics of a step and of a validation with verl 0.5's keys, for recipes with their own logs."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto

Metrics = dict[str, Any]

# Phases whose seconds are divided by response tokens; others are divided by all tokens.
_RESPONSE_PHASES = ("gen",)
_ALL_TOKEN_PHASES = ("ref", "values", "adv", "update_critic", "update_actor")


def reduce_metrics(metrics: Metrics) -> Metrics:
    """Reduce the list under each key to one number, in place.

    A key with "max" or "min" in its name gets the largest or smallest entry, any other the mean.
    """
    for name, values in metrics.items():
        if "max" in name:
            metrics[name] = np.max(values)
        elif "min" in name:
            metrics[name] = np.min(values)
        else:
            metrics[name] = np.mean(values)
    return metrics


def _compute_response_info(batch: DataProto) -> dict[str, torch.Tensor]:
    """Return `response_mask` (B, R), and `prompt_length` and `response_length` (B,) in tokens."""
    width = batch.batch["responses"].shape[-1]
    attention_mask = batch.batch["attention_mask"]
    response_mask = attention_mask[:, -width:]
    return {
        "response_mask": response_mask,
        "prompt_length": attention_mask[:, :-width].sum(-1).float(),
        "response_length": response_mask.sum(-1).float(),
    }


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> Metrics:
    """Return mean, max and min of scores, rewards, advantages, returns, values and lengths."""
    columns = batch.batch
    info = _compute_response_info(batch)
    masks = columns if "response_mask" in columns.keys() else info
    mask = masks["response_mask"].bool()

    returns = columns["returns"][mask]
    metrics = {
        **_spread("critic/score", columns["token_level_scores"].sum(-1)),
        **_spread("critic/rewards", columns["token_level_rewards"].sum(-1)),
        **_spread("critic/advantages", columns["advantages"][mask]),
        **_spread("critic/returns", returns),
    }
    if use_critic:
        values = columns["values"][mask]
        unexplained = torch.var(returns - values) / (torch.var(returns) + 1e-5)
        metrics.update(_spread("critic/values", values))
        metrics["critic/vf_explained_var"] = (1.0 - unexplained).item()

    response_width = columns["responses"].shape[-1]
    prompt_width = columns["attention_mask"].shape[-1] - response_width
    for name, width in (("response", response_width), ("prompt", prompt_width)):
        lengths = info[f"{name}_length"]
        metrics.update(_spread(f"{name}_length", lengths))
        metrics[f"{name}_length/clip_ratio"] = (lengths == width).float().mean().item()

    if "__num_turns__" in batch.non_tensor_batch:
        turns = batch.non_tensor_batch["__num_turns__"]
        metrics["num_turns/min"] = turns.min()
        metrics["num_turns/max"] = turns.max()
        metrics["num_turns/mean"] = turns.mean()
    return metrics


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    return {
        f"{name}/mean": torch.mean(values).item(),
        f"{name}/max": torch.max(values).item(),
        f"{name}/min": torch.min(values).item(),
    }


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> Metrics:
    """Return the seconds of each phase, and milliseconds per token of phases that use tokens."""
    info = _compute_response_info(batch)
    num_response_tokens = torch.sum(info["response_length"]).item()
    num_all_tokens = torch.sum(info["prompt_length"]).item() + num_response_tokens
    tokens = {
        **dict.fromkeys(_RESPONSE_PHASES, num_response_tokens),
        **dict.fromkeys(_ALL_TOKEN_PHASES, num_all_tokens),
    }

    metrics = {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
    for name in tokens.keys() & timing_raw.keys():
        metrics[f"timing_per_token_ms/{name}"] = timing_raw[name] * 1000 / tokens[name]
    return metrics


def compute_throughout_metrics(
    batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int
) -> Metrics:
    """Return the tokens of the batch, the seconds of the step, and tokens per second and device.

    The tokens are those of `meta_info["global_token_num"]`.
    """
    num_tokens = sum(batch.meta_info["global_token_num"])
    seconds = timing_raw["step"]
    return {
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / (seconds * n_gpus),
    }


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[list[Any]], float]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Return (mean, standard deviation) of each of `reduce_fns` over random subsets.

    Takes `n_bootstrap` subsets of `subset_size` entries, drawn with replacement.
    """
    generator = np.random.RandomState(seed)
    results: list[list[float]] = [[] for _ in reduce_fns]
    for _ in range(n_bootstrap):
        chosen = generator.choice(len(data), size=subset_size, replace=True)
        subset = [data[index] for index in chosen]
        for values, reduce_fn in zip(results, reduce_fns):
            values.append(reduce_fn(subset))
    return [(np.mean(values), np.std(values)) for values in results]  # pyright: ignore[reportReturnType]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """Return `val_key` of the first entry with the most frequent `vote_key`.

    In a tie, the vote that was seen first wins.
    """
    values_of_vote = defaultdict(list)
    for entry in data:
        values_of_vote[entry[vote_key]].append(entry[val_key])
    winner = max(values_of_vote, key=lambda vote: len(values_of_vote[vote]))
    return values_of_vote[winner][0]


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_inputs: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = 42,
) -> dict[str, dict[str, dict[str, float]]]:
    """Return {data source: {variable: {metric: value}}}, averaged over a data source's prompts.

    The n responses to a prompt give mean@n, and for n > 1 std@n, best@k and worst@k, with /mean and
    /std for k = 2, 4, ..., n. With a `pred` to vote by, there is also maj@k. A variable with texts,
    or with None, has no metrics.
    """
    rows_of_prompt: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row, prompt in enumerate(zip(data_sources, sample_inputs)):
        rows_of_prompt[prompt].append(row)

    collected: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for (source, _), rows in rows_of_prompt.items():
        infos = {}
        for name, values in infos_dict.items():
            infos[name] = [values[row] for row in rows]

        for name, values in infos.items():
            # Rules give an answer that they did not find as None.
            if any(value is None or isinstance(value, str) for value in values):
                continue
            found = _metrics_of_prompt(values, infos.get("pred"), seed)
            for metric, value in found.items():
                collected[source, name, metric].append(value)

    metrics: dict[str, dict[str, dict[str, float]]] = {}
    for (source, name, metric), values in collected.items():
        of_name = metrics.setdefault(source, {}).setdefault(name, {})
        of_name[metric] = np.mean(values)  # pyright: ignore[reportArgumentType]
    return metrics


def _metrics_of_prompt(values: list[Any], answers: list[Any] | None, seed: int) -> dict[str, float]:
    n = len(values)
    metrics: Metrics = {f"mean@{n}": np.mean(values)}
    if n == 1:
        return metrics

    metrics[f"std@{n}"] = np.std(values)
    for k in _subset_sizes(n):
        best, worst = bootstrap_metric(values, k, [np.max, np.min], seed=seed)
        metrics[f"best@{k}/mean"], metrics[f"best@{k}/std"] = best
        metrics[f"worst@{k}/mean"], metrics[f"worst@{k}/std"] = worst
        if answers:
            votes = [{"val": value, "pred": pred} for value, pred in zip(values, answers)]
            majority = partial(calc_maj_val, vote_key="pred", val_key="val")
            (found,) = bootstrap_metric(votes, k, [majority], seed=seed)
            metrics[f"maj@{k}/mean"], metrics[f"maj@{k}/std"] = found
    return metrics


def _subset_sizes(n: int) -> list[int]:
    """Return 2, 4, 8, ... below n, and n."""
    powers = [1 << exponent for exponent in range(1, (n - 1).bit_length())]
    return [*powers, n]
