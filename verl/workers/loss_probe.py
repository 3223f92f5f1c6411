"""Find losses whose gradient depends on how a mini-batch is cut into micro-batches."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from verl.algorithms.policy_losses import PolicyLossInputs
from verl.utils.logging import say_once
from verl.utils.user_parts import NamedPart
from verl.workers.objective import Columns

# A loss without a gradient yet, at a ratio of 1 say, is tried again so many times.
MOST_TRIES = 16
# fp32 sums differ by 1e-6; a mean in place of a weighted sum by the number of micro-batches.
TOLERANCE = 1e-3

# loss(inputs, packed columns) -> scalar
ScalarLoss = Callable[[PolicyLossInputs, Columns], Tensor]


class LossProbe:
    """Warn of a loss whose gradient is not a sum over responses, weighted by `weights`."""

    def __init__(self, part: NamedPart) -> None:
        self._part = part
        self._tries_left = MOST_TRIES

    def __call__(self, loss: ScalarLoss, inputs: PolicyLossInputs, columns: Columns) -> None:
        """Try the loss on every second response with half its weights, until it has a gradient."""
        if not self._tries_left:
            return

        self._tries_left -= 1
        chosen = torch.isin(inputs.sequence, inputs.sequence.unique()[::2])
        given = {name: value for name, value in inputs._asdict().items() if value is not None}
        part = {name: value[chosen] for name, value in given.items()}
        part_columns = {name: column[chosen] for name, column in columns.items()}

        among_others = _gradient(loss, inputs, columns)[chosen]
        # Half: a mean over fewer responses has larger weights, never smaller ones.
        part["weights"] = part_columns["weights"] = 0.5 * inputs.weights[chosen]
        alone = 2 * _gradient(loss, inputs._replace(**part), part_columns)
        largest = torch.maximum(among_others.norm(), alone.norm())
        if largest > 0:
            self._tries_left = 0
        # False where a gradient is not finite: the step reports that.
        if (among_others - alone).norm() > TOLERANCE * largest:
            say_once(
                f"{self._part} has a gradient that depends on micro-batches and on the number of "
                "ranks. Return the sum of the token losses times inputs.weights, as output_of does "
                "(agg_loss in verl's signature), without means over the micro-batch and without "
                "random numbers.",
                logging.WARNING,
            )


def _gradient(loss: ScalarLoss, inputs: PolicyLossInputs, columns: Columns) -> Tensor:
    """Return the gradient of a loss by the log-probs (N,)."""
    log_probs = inputs.log_probs.detach().clone().requires_grad_()
    devices = [log_probs.device] if log_probs.is_cuda else []
    # A resumed run tries the loss again, and must draw the same numbers afterwards.
    with torch.random.fork_rng(devices):
        value = loss(inputs._replace(log_probs=log_probs), columns)
    if not value.requires_grad:
        return torch.zeros_like(log_probs)
    return torch.autograd.grad(value, log_probs, materialize_grads=True)[0]
