"""The loop over mini-batches that actor and critic share."""

import zlib
from collections.abc import Iterator
from typing import Any

import torch

from verl.algorithms.masked import aggregation_weights
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.protocol import DataProto
from verl.utils.logging import logger
from verl.workers.losses import Objective


def mini_batches(batch: DataProto, rows: int, *, epochs: int, shuffle: bool, seed: int) -> Iterator[DataProto]:
    """Consecutive slices of `rows` rows, the last one shorter if it must be; each epoch in a new order if shuffled."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(batch), generator=generator) if shuffle else torch.arange(len(batch))
        for start in range(0, len(batch), rows):
            yield batch if rows >= len(batch) and not shuffle else batch.select_idxs(order[start : start + rows])


def _seed(batch: DataProto) -> int:
    """Of the order of rows: another one for every batch, and the same for the same batch in a resumed run."""
    first = batch.non_tensor_batch["uid"][0] if "uid" in batch.non_tensor_batch else ""
    return zlib.crc32(str(first).encode())


def run_updates(
    engine: TrainEngine,
    batch: DataProto,
    objective: Objective,
    *,
    name: str,
    mini_batch_rows: int,
    epochs: int,
    shuffle: bool,
    loss_agg_mode: str,
    budget: TokenBudget,
    **forward_arguments: Any,
) -> dict[str, float]:
    """One optimizer step per mini-batch, one step of the schedule; metrics are means over the optimizer steps.

    The learning rate and the number of skipped steps are reported as `<name>/lr` and `<name>/skipped_updates`.
    """
    collected: dict[str, list[float]] = {}
    skipped, lr = 0, 0.0
    for mini_batch in mini_batches(batch, mini_batch_rows, epochs=epochs, shuffle=shuffle, seed=_seed(batch)):
        mini_batch = mini_batch.select()  # a column more, and the caller's batch stays as it is
        mini_batch.batch["weights"] = aggregation_weights(mini_batch.batch["response_mask"], loss_agg_mode)
        columns = objective.columns(set(mini_batch.batch.keys()))
        metrics = engine.forward_backward(mini_batch, budget, objective, columns, **forward_arguments)
        result = engine.step()
        lr = result.lr
        metrics[f"{name}/grad_norm"] = result.grad_norm
        if result.skipped:
            skipped += 1
            logger.warning(
                "%s: non-finite loss or gradient; this update is skipped on all ranks. Samples: %s.",
                name,
                ", ".join(result.offenders) or "none alone, only together",
            )
        for key, value in metrics.items():
            collected.setdefault(key, []).append(value)
    engine.step_schedule()
    means = {key: sum(values) / len(values) for key, values in collected.items()}
    return {**means, f"{name}/lr": lr, f"{name}/skipped_updates": float(skipped)}
