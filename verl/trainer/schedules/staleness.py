"""Measures of batches with tokens of several versions of the weights, and their treatment."""

from collections.abc import Sequence
from itertools import compress

import torch

from verl.config.async_training import AsyncTrainingConfig
from verl.protocol import DataProto
from verl.rollout.book import Book, Group
from verl.trainer.rows import prompts_of
from verl.utils.errors import RolloutError


def staleness_metrics(
    batch: DataProto, groups: Sequence[Group], options: AsyncTrainingConfig
) -> dict[str, float]:
    """Describe the ages of a batch's tokens, in versions.

    Under verl's names `fully_async/*`: `count/stale_samples_processed` are prompts and
    `count/stale_trajectory_processed` responses of this step with a token of older weights;
    `partial/total_partial_num` and `partial_ratio` are responses that several versions drew, and
    `partial/max_partial_span` is the largest difference of these versions.

    Raises RolloutError where `on_stale=mask` has left no token to learn from.
    """
    ages = batch.batch["token_age"]
    drawn = ages >= 0
    oldest = ages.max(-1).values
    spans = []
    for group in groups:
        spans += [sample.span for sample in group.samples]

    is_stale = oldest > 0
    stale_prompts = set(compress(prompts_of(batch), is_stale.tolist()))
    beyond = ages > options.bound
    if options.on_stale == "mask" and beyond.any() and not batch.batch["response_mask"].any():
        raise RolloutError(
            f"All tokens of this step are older than async_training.max_staleness={options.bound} "
            "allows, and on_stale=mask leaves none to learn from. Raise max_staleness, lower "
            "staleness_threshold, or set on_stale=wait."
        )

    metrics = {
        "fully_async/tokens_beyond_bound": float(beyond.sum()),
        "fully_async/count/stale_samples_processed": float(len(stale_prompts)),
        "fully_async/count/stale_trajectory_processed": float(is_stale.sum()),
        "fully_async/partial/total_partial_num": float(sum(span > 0 for span in spans)),
        "fully_async/partial/partial_ratio": sum(span > 0 for span in spans) / len(spans),
        "fully_async/partial/max_partial_span": float(max(spans)),
        "fully_async/age/max": float(ages.max()),
        "fully_async/age/mean": ages[drawn].double().mean().item(),
    }
    for age, count in enumerate(torch.bincount(ages[drawn]).tolist()):
        metrics[f"fully_async/age/tokens_{age}"] = float(count)
    return metrics


def book_metrics(book: Book) -> dict[str, float]:
    """Count the trajectories in each state, and the tokens that were discarded so far."""
    metrics = {
        "fully_async/discarded_tokens": float(book.discarded_tokens),
        "fully_async/replayed_episodes": float(book.replayed_episodes),
    }
    for state, count in book.counts().items():
        metrics[f"fully_async/book/{state}"] = float(count)
    return metrics


def apply_policy(batch: DataProto, options: AsyncTrainingConfig) -> None:
    """Leave out or weigh down tokens beyond the bound, as `async_training.on_stale` says.

    Weights go to the column `staleness_weights`.
    """
    excess = (batch.batch["token_age"] - options.bound).clamp(min=0)
    beyond = excess > 0
    if options.on_stale == "mask":
        batch.batch["response_mask"] = batch.batch["response_mask"] * ~beyond
    elif options.on_stale == "reweight":
        batch.batch["staleness_weights"] = 1 / (1 + excess.float())


def with_staleness_weights(batch: DataProto) -> DataProto:
    """Multiply the weights of the policy loss by `staleness_weights`, where there are any."""
    columns = batch.batch
    if "staleness_weights" not in columns.keys():
        return batch
    weights = columns["staleness_weights"]
    if "rollout_is_weights" in columns.keys():
        weights = weights * columns["rollout_is_weights"]
    batch = batch.select()  # the caller's keeps its columns
    batch.batch["rollout_is_weights"] = weights
    return batch
