"""The numbers of a step, under the names that verl's users plot."""

from collections.abc import Mapping

import torch

from verl.protocol import DataProto
from verl.trainer.episodes import episode_rows
from verl.trainer.rows import counted_rows, response_lengths


def _spread(name: str, values: torch.Tensor) -> dict[str, float]:
    """Compute mean, max and min of a 1-D tensor; nothing when it is empty."""
    if values.numel() == 0:
        return {}
    values = values.float()
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def _share(is_counted: torch.Tensor) -> float:
    """Return the part of a mask that is true."""
    return is_counted.float().mean().item()


def data_metrics(batch: DataProto, *, has_reward: bool = True) -> dict[str, float]:
    """Summarize scores, rewards, advantages, returns, values and lengths of a batch of
    trajectories.

    Args:
        batch: of the step.
        has_reward: False leaves out scores and rewards, which are zeros then.
    """
    columns = batch.batch
    mask = columns["response_mask"].bool()
    counted = counted_rows(batch)
    rows = episode_rows(batch)
    if rows is not None:  # the parts of an episode have its score each
        is_last = torch.zeros(len(batch), dtype=torch.bool)
        is_last[rows.last] = True
        counted &= is_last

    response_length = response_lengths(batch)
    prompt_length = columns["attention_mask"].sum(-1) - response_length
    response_width = columns["responses"].shape[1]
    prompt_width = columns["prompts"].shape[1]

    metrics = {}
    if has_reward:
        metrics |= _spread("critic/score", columns["token_level_scores"].sum(-1)[counted])
        metrics |= _spread("critic/rewards", columns["token_level_rewards"].sum(-1)[counted])

    metrics |= {
        **_spread("critic/advantages", columns["advantages"][mask]),
        **_spread("critic/returns", columns["returns"][mask]),
        **_spread("response_length", response_length),
        **_spread("prompt_length", prompt_length),
        # A response that fills its whole width was most likely cut off.
        "response_length/clip_ratio": _share(response_length == response_width),
        "prompt_length/clip_ratio": _share(prompt_length == prompt_width),
    }

    if "values" in columns.keys():
        values = columns["values"][mask]
        returns = columns["returns"][mask]
        metrics.update(_spread("critic/values", values))
        metrics["critic/vf_explained_var"] = explained_variance(values, returns)

    return metrics


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """Compute 1 - Var(returns - values) / Var(returns); 0 when the returns do not vary."""
    if returns.numel() == 0:
        return 0.0
    variance = returns.var(unbiased=False)
    if variance < 1e-12:
        return 0.0
    return (1.0 - (returns - values).var(unbiased=False) / variance).item()


# Phases that scale with the response tokens; all others work on prompts and responses.
_RESPONSE_PHASES = ("gen",)
# Phases that also work on other tokens than those of the batch.
_NOT_PER_TOKEN = ("step", "testing")


def timing_metrics(
    batch: DataProto, seconds: Mapping[str, float], num_devices: int
) -> dict[str, float]:
    """Compute seconds per phase, milliseconds per token and tokens per second per device."""
    num_response_tokens = int(response_lengths(batch).sum())
    num_total_tokens = int(batch.batch["attention_mask"].sum())

    metrics = {}
    for name, value in seconds.items():
        metrics[f"timing_s/{name}"] = value
        tokens = num_response_tokens if name in _RESPONSE_PHASES else num_total_tokens
        if name not in _NOT_PER_TOKEN and tokens > 0:
            metrics[f"timing_per_token_ms/{name}"] = 1000 * value / tokens

    device_seconds = seconds["step"] * num_devices
    metrics["perf/total_num_tokens"] = num_total_tokens
    metrics["perf/time_per_step"] = seconds["step"]
    metrics["perf/throughput"] = num_total_tokens / device_seconds
    return metrics
