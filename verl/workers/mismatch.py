"""Compare the log-probs of the rollout engine with the trainer's, on the tokens of all ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.algorithms.mismatch import mismatch_metrics
from verl.distributed.collectives import Axis, gather_objects
from verl.workers.objective import Columns


class SeenTokens:
    """Tokens of an update, kept until `take` compares them.

    Kept are those of a mini-batch without old log-probs, those of the first mini-batch with
    `compares_first`, and apart from them those that have an age.
    """

    def __init__(self) -> None:
        self.compares_first = False
        self._tokens: list[tuple[Tensor, Tensor, Tensor]] = []
        self._by_age: list[tuple[Tensor, ...]] = []
        self._num_updates = 0  # mini-batches since `take`
        self._num_ended = (0, 0)  # entries of `_tokens` and `_by_age` from these

    def add(self, log_probs: Tensor, columns: Columns) -> None:
        """Keep the tokens of a pass."""
        seen = (log_probs.detach(), columns["rollout_log_probs"], columns["response_mask"])
        is_first = self.compares_first and self._num_updates == 0
        if is_first or "old_log_probs" not in columns:
            self._tokens.append(seen)
        if "token_age" in columns:
            self._by_age.append((*seen, columns["token_age"]))

    def restart(self) -> None:
        """Forget the tokens of this mini-batch, but not those of earlier ones."""
        tokens, by_age = self._num_ended
        del self._tokens[tokens:]
        del self._by_age[by_age:]

    def end(self) -> None:
        """End a mini-batch."""
        self._num_updates += 1
        self._num_ended = (len(self._tokens), len(self._by_age))

    def take(self, data: Axis) -> dict[str, float]:
        """Compare the kept tokens of all ranks along `data`, and forget them."""
        self._num_updates = 0
        self._num_ended = (0, 0)
        tokens = self._tokens
        self._tokens = []
        by_age = mismatch_by_age(self._by_age, data)
        self._by_age = []
        if not tokens:
            return by_age

        trainer, rollout, mask = map(torch.cat, zip(*tokens))
        return {**mismatch_of_all(rollout, trainer, mask, data), **by_age}


def mismatch_of_all(rollout: Tensor, trainer: Tensor, mask: Tensor, data: Axis) -> dict[str, float]:
    """Compute `mismatch_metrics` over the tokens of all ranks along `data`; each must call.

    Empty without any token, as in a mini-batch of dropped episodes.
    """
    if data.size > 1:
        keep = mask.bool()
        pieces = gather_objects((rollout[keep].cpu(), trainer[keep].cpu()), data)
        rollout, trainer = map(torch.cat, zip(*pieces))
        mask = torch.ones_like(rollout)
    if not mask.any():
        return {}
    return mismatch_metrics(rollout, trainer, mask)


def mismatch_by_age(seen: Sequence[tuple[Tensor, ...]], data: Axis) -> dict[str, float]:
    """Compute the mismatch apart for tokens of each age, over all ranks along `data`.

    `fully_async/age_<a>/kl` is the mean of log p_rollout - log p_trainer in the update, an estimate
    of the KL divergence; `fully_async/age_<a>/ess` the effective share of these tokens under
    importance weighting, see `mismatch_metrics`.

    Args:
        seen: log-probs of the trainer and of the rollout, mask and age of packed tokens.
    """
    if not seen:
        return {}
    trainer, rollout, mask, age = map(torch.cat, zip(*seen))
    keep = mask.bool()
    mine = tuple(column[keep].cpu() for column in (trainer, rollout, age))
    trainer, rollout, age = map(torch.cat, zip(*gather_objects(mine, data)))
    metrics = {}
    for each in age.unique().tolist():
        own = age == each
        found = mismatch_metrics(rollout[own], trainer[own], own[own])
        metrics[f"fully_async/age_{each}/kl"] = found["training/rollout_kl"]
        metrics[f"fully_async/age_{each}/ess"] = found["training/rollout_ess"]
    return metrics
