"""The answer of a loss function, and how its numbers add up to those of a mini-batch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl.distributed.collectives import all_reduce_sum, gather_objects
from verl.distributed.mesh import Mesh
from verl.utils.errors import AlgorithmError


@dataclass(frozen=True)
class LossOutput:
    """The answer of a loss function for one micro-batch."""

    loss: Tensor  # scalar: this micro-batch's share of the mini-batch's loss
    # (M,), averaged over the mini-batch's response_mask
    means: dict[str, Tensor] = field(default_factory=dict)
    # scalars: shares of a number of the mini-batch
    sums: dict[str, Tensor] = field(default_factory=dict)


# (outputs of the module, packed columns, row number of each token) -> LossOutput
LossFunction = Callable[[dict[str, Tensor], dict[str, Tensor], Tensor], LossOutput]


class Totals:
    """Numbers of a mini-batch, added up on the device in float64: their order hardly matters."""

    def __init__(self, mesh: Mesh) -> None:
        self._axis = mesh.data  # ranks along the sequence axis count the same tokens
        self._zero = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._loss = self._zero
        self._tokens = self._zero
        self._means: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}

    def add(self, output: LossOutput, response_mask: Tensor) -> None:
        """Count in one micro-batch; `response_mask` (M,)."""
        mask = response_mask.bool()
        self._loss = self._loss + output.loss.detach()
        self._tokens = self._tokens + mask.sum()
        for name, values in output.means.items():
            total = torch.where(mask, values.detach().double(), 0.0).sum()
            self._means[name] = self._means.get(name, self._zero) + total
        for name, value in output.sums.items():
            self._sums[name] = self._sums.get(name, self._zero) + value.detach()

    def read(self) -> tuple[dict[str, float], bool]:
        """Return the means and sums over all ranks, and whether the loss is finite.

        Raises AlgorithmError, on every rank, where a loss has other metrics on another rank.
        """
        self._require_same_names()
        mine = [self._loss, self._tokens, *self._means.values(), *self._sums.values()]
        everything = torch.stack(mine)
        loss, tokens, *numbers = all_reduce_sum(everything, self._axis).tolist()

        num_means = len(self._means)
        metrics = {}
        for name, number in zip(self._means, numbers[:num_means]):
            metrics[name] = number / max(tokens, 1.0)
        metrics.update(zip(self._sums, numbers[num_means:]))
        return metrics, math.isfinite(loss)

    def _require_same_names(self) -> None:
        """Compare the names of metrics, which ranks add up in their order."""
        by_rank = gather_objects([*self._means, *self._sums], self._axis)
        for rank, names in enumerate(by_rank):
            only_one = sorted(set(names).symmetric_difference(by_rank[0]))
            if only_one:
                raise AlgorithmError(
                    "A loss must return the same metrics on every rank, got "
                    f"{', '.join(only_one)} on rank 0 or on rank {rank} alone. Return 0 for one "
                    "without a value."
                )
