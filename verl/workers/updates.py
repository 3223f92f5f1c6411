"""The loop over mini-batches that actor and critic share."""

import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from verl.algorithms.masked import aggregation_weights
from verl.distributed.collectives import Axis, all_reduce_sum, max_of
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.protocol import DataProto
from verl.single_controller import note_progress
from verl.utils.arithmetic import ceil_div
from verl.utils.errors import ConfigError, DataError
from verl.utils.logging import logger
from verl.workers.objective import Objective


def mini_batches(
    batch: DataProto, rows: int, *, epochs: int, shuffle: bool, seed: int
) -> Iterator[DataProto]:
    """Give consecutive slices of `rows` rows, the last one shorter if it must be.

    Shuffled, each epoch has a new order.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        if not shuffle and rows >= len(batch):
            yield batch
            continue

        if shuffle:
            order = torch.randperm(len(batch), generator=generator)
        else:
            order = torch.arange(len(batch))
        for start in range(0, len(batch), rows):
            yield batch.select_idxs(order[start : start + rows])


def global_weights(response_mask: torch.Tensor, mode: str, data: Axis) -> torch.Tensor:
    """Compute `aggregation_weights` (B, R) of this rank's rows, by counts over all ranks."""
    mask = response_mask.bool()
    counts = torch.stack([mask.sum(), mask.any(-1).sum()])
    tokens, sequences = all_reduce_sum(counts, data).tolist()
    if mode == "token-mean":
        # Each weighs one over all tokens, as seq-mean-token-sum does with as many sequences.
        return aggregation_weights(mask, "seq-mean-token-sum", num_sequences=tokens)
    return aggregation_weights(mask, mode, num_sequences=sequences)


def rows_of_a_rank(batch: DataProto, mini_batch_rows: int | None, data: Axis) -> int:
    """Return how many of a mini-batch's rows each rank along `data` has, dealt evenly.

    Args:
        batch: rows of this rank.
        mini_batch_rows: rows of all ranks together; None: all that each has. A mini-batch of the
            whole batch may leave out the rows of padding.

    Raises ConfigError or DataError, on every rank, where mini-batches would not be the same on all.
    """
    most = max_of(len(batch), data)
    fewest = -max_of(-len(batch), data)
    if most != fewest:
        raise DataError(
            f"Every data-parallel rank needs as many rows of a batch as the others, got {fewest} "
            f"to {most}. Pad the batch with rows that have response_mask 0, or choose a "
            "train_batch_size that the ranks divide."
        )
    if not len(batch):
        raise DataError("An update needs rows, got a batch without any. Leave the update out.")
    # The ranks pad the batch by fewer rows than they are.
    if mini_batch_rows is None or mini_batch_rows > (len(batch) - 1) * data.size:
        return len(batch)

    if mini_batch_rows % data.size:
        below = mini_batch_rows // data.size * data.size
        above = below + data.size
        fitting = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            "The data-parallel ranks must divide the rows of a mini-batch (ppo_mini_batch_size * "
            f"rollout.n), got {data.size} and {mini_batch_rows}. Nearest that fit: {fitting} rows."
        )
    return mini_batch_rows // data.size


def _seed(batch: DataProto) -> int:
    """Return the seed of the order of rows: new for every batch, equal in a resumed run."""
    first = batch.non_tensor_batch["uid"][0] if "uid" in batch.non_tensor_batch else ""
    # The trainer's uid is "step-row". The step is equal on all ranks, the first row is not.
    return zlib.crc32(str(first).split("-")[0].encode())


def run_updates(
    engine: TrainEngine,
    batch: DataProto,
    objective: Objective,
    *,
    name: str,
    mini_batch_rows: int | None,
    epochs: int,
    shuffle: bool,
    loss_agg_mode: str,
    budget: TokenBudget,
    **forward_arguments: Any,
) -> dict[str, float]:
    """Make one optimizer step per mini-batch, and one step of the schedule.

    Every rank must call this, with equally many rows. Returned metrics are means over the optimizer
    steps, without those that were skipped, whose losses or gradients are not finite; where all
    were, over all. The learning rate and the number of skipped steps are `<name>/lr` and
    `<name>/skipped_updates`.

    Args:
        batch: rows of this rank.
        mini_batch_rows: rows of all data-parallel ranks together; None: one mini-batch of all.
    """
    made: list[dict[str, float]] = []
    skipped: list[dict[str, float]] = []
    lr = 0.0
    rows = rows_of_a_rank(batch, mini_batch_rows, engine.mesh.data)
    with engine.on_device(optimizer=True):
        order = mini_batches(batch, rows, epochs=epochs, shuffle=shuffle, seed=_seed(batch))
        total = epochs * ceil_div(len(batch), rows)
        for number, mini_batch in enumerate(order):
            note_progress(number, total, "mini-batches")
            mini_batch = mini_batch.select()  # the caller's batch gets no further column
            mask = mini_batch.batch["response_mask"]
            mini_batch.batch["weights"] = global_weights(mask, loss_agg_mode, engine.mesh.data)
            metrics = _forward_backward(engine, mini_batch, objective, budget, forward_arguments)

            result = engine.step()
            lr = result.lr
            metrics[f"{name}/grad_norm"] = result.grad_norm
            if result.skipped:
                _warn_of_skipped_step(engine, name, result.offenders)
            (skipped if result.skipped else made).append(metrics)

    engine.step_schedule()
    means = _means(made or skipped)
    return {**means, f"{name}/lr": lr, f"{name}/skipped_updates": float(len(skipped))}


def _means(of_steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the steps that have it."""
    collected: dict[str, list[float]] = {}
    for metrics in of_steps:
        for key, value in metrics.items():
            collected.setdefault(key, []).append(value)
    return {key: sum(values) / len(values) for key, values in collected.items()}


def _forward_backward(
    engine: TrainEngine,
    mini_batch: DataProto,
    objective: Objective,
    budget: TokenBudget,
    forward_arguments: dict[str, Any],
) -> dict[str, float]:
    """Compute the gradients of a mini-batch with `weights`; return the metrics of its loss."""
    infer = partial(engine.infer, mini_batch, budget, **forward_arguments)
    objective.begin(mini_batch, infer, engine.mesh.data)

    # A column of a user's own may have one value for each row, which no token reads.
    shape = mini_batch.batch["response_mask"].shape
    of_tokens = {name for name, column in mini_batch.batch.items() if column.shape[:2] == shape}
    metrics = engine.forward_backward(
        mini_batch,
        budget,
        objective,
        objective.columns(of_tokens),
        on_restart=objective.restart,
        **forward_arguments,
    )
    objective.end()
    return metrics


def _warn_of_skipped_step(engine: TrainEngine, name: str, offenders: list[str]) -> None:
    if engine.mesh.world.rank == 0:
        logger.warning(
            "%s: non-finite loss or gradient; this update is skipped on all ranks. Samples: %s.",
            name,
            ", ".join(offenders) or "none alone, only together",
        )
