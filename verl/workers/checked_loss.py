"""Call a registered policy loss, which may be a user's, and check its answer."""

import logging
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.policy_losses import (
    PolicyLossInputs,
    PolicyLossOutput,
    extra_losses,
    policy_losses,
)
from verl.engine.memory import shortage_of
from verl.utils.errors import AlgorithmError
from verl.utils.logging import say_once
from verl.utils.user_parts import NamedPart
from verl.workers.loss_probe import LossProbe
from verl.workers.objective import Columns

# Metrics `actor/<name>` of every update.
_OF_THE_UPDATE = {
    "pg_loss",
    "entropy",
    "kl_loss",
    "distillation_loss",
    "grad_norm",
    "lr",
    "skipped_updates",
}


class CheckedLoss:
    """The policy loss of a name, with its settings.

    Raises AlgorithmError where it returns anything but a PolicyLossOutput that can be learnt from.
    """

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self._function = policy_losses.get(name)
        self._part = NamedPart("policy loss", name, self._function)
        self._settings = settings
        self._metric_names: list[str] | None = None
        self._probe = LossProbe(self._part)

    def __call__(self, inputs: PolicyLossInputs, *, is_looking: bool = False) -> PolicyLossOutput:
        """Return the loss, and its metrics with a value for each token.

        With `is_looking` for the rows to blame, warn of a loss that is not finite.
        """
        with self._part.naming_errors(passes=is_shortage), self._part.keeping(inputs._asdict()):
            policy = self._function(inputs, **self._settings)

        loss = getattr(policy, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            expected = "a PolicyLossOutput with a scalar tensor as loss"
            raise self._part.must_return(expected, policy if loss is None else loss)
        if inputs.log_probs.requires_grad and not loss.requires_grad:
            raise AlgorithmError(
                f"{self._part} must return a loss that depends on inputs.log_probs, or nothing is "
                "learnt, got one without a gradient (was it detached?)."
            )

        if is_looking:
            self._warn_of_non_finite(loss, inputs)
        elif loss.requires_grad:
            with self._part.naming_errors(passes=is_shortage):
                self._probe(self._loss_alone, inputs, {})
        means = self._per_token(policy.means, inputs.log_probs.detach())
        return policy._replace(loss=loss.reshape(()), means=means)

    def _loss_alone(self, inputs: PolicyLossInputs, columns: Columns) -> Tensor:
        return self._function(inputs, **self._settings).loss

    def _per_token(self, means: Any, log_probs: Tensor) -> Columns:
        """Return the metrics of a policy loss, each as wide as `log_probs`.

        Their names must not change: ranks add the metrics up in their order.
        """
        if not isinstance(means, Mapping):
            raise self._part.must_return("a dict of metrics as means", means)
        for name in means:
            if not isinstance(name, str):
                raise self._part.must_return("a dict of metrics by name as means", name)
        per_token = {name: self._widened(name, value, log_probs) for name, value in means.items()}

        names = sorted(per_token)
        if self._metric_names is None:
            self._refuse_metrics_of_the_update(names)
            self._metric_names = names
        if names != self._metric_names:
            raise AlgorithmError(
                f"{self._part} must return the same metrics each time, got "
                f"{', '.join(names) or 'none'} after {', '.join(self._metric_names) or 'none'}. "
                "Return 0 for one without a value."
            )
        return {name: per_token[name] for name in names}

    def _refuse_metrics_of_the_update(self, names: list[str]) -> None:
        for name in names:
            if name.removeprefix("actor/") in _OF_THE_UPDATE:
                raise AlgorithmError(
                    f"{self._part} returns a metric '{name}', which every update reports itself, "
                    "and only one value can be kept. Give it another name, or leave it out."
                )

    def _widened(self, name: str, value: Any, log_probs: Tensor) -> Tensor:
        """Return the values of a metric, one for each token."""
        if isinstance(value, Tensor | Real):
            tensor = torch.as_tensor(value).detach().to(log_probs.device)
            if tensor.numel() == 1:
                tensor = tensor.reshape(()).expand_as(log_probs)
            if tensor.shape == log_probs.shape:
                return tensor
        raise self._part.must_return(f"a number, or one for each token, as means['{name}']", value)

    def _warn_of_non_finite(self, loss: Tensor, inputs: PolicyLossInputs) -> None:
        """Warn where the loss is not finite for finite inputs."""
        read = (inputs.log_probs, inputs.old_log_probs, inputs.advantages, inputs.weights)
        if not loss.isfinite() and all(column.isfinite().all() for column in read):
            say_once(
                f"{self._part} gave {loss.item()} for finite log-probs and advantages.",
                logging.WARNING,
            )


class CheckedTerm:
    """An extra loss term of a name.

    Raises AlgorithmError where it returns anything but a scalar that can be learnt from.
    """

    def __init__(self, name: str) -> None:
        self._function = extra_losses.get(name)
        self._part = NamedPart("extra loss term", name, self._function)
        self._probe = LossProbe(self._part)

    def __call__(
        self, inputs: PolicyLossInputs, columns: Columns, *, is_looking: bool = False
    ) -> Tensor:
        """Return the term of one micro-batch."""
        read = {**inputs._asdict(), **columns}
        with self._part.naming_errors(passes=is_shortage), self._part.keeping(read):
            term = self._function(inputs, columns)

        scalar = torch.as_tensor(term) if isinstance(term, Tensor | Real) else None
        if scalar is None or scalar.numel() != 1:
            raise self._part.must_return("a scalar", term)
        # Zero: nothing of this micro-batch counts.
        if inputs.log_probs.requires_grad and not scalar.requires_grad and scalar != 0:
            raise AlgorithmError(
                f"{self._part} must return a term that depends on inputs.log_probs, or nothing is "
                "learnt from it, got one without a gradient (was it detached?)."
            )

        if scalar.requires_grad and not is_looking:
            with self._part.naming_errors(passes=is_shortage):
                self._probe(self._function, inputs, columns)
        return scalar.reshape(())


def is_shortage(error: BaseException) -> bool:
    """Return whether memory ran out: the engine handles that, by smaller passes."""
    return shortage_of(error, torch.device("cpu")) is not None
