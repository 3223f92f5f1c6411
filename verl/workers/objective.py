"""Loss functions of the engine, from packed outputs and batch columns: values, fine-tuning."""

from collections.abc import Callable

from torch import Tensor

from verl.algorithms.value_losses import clipped_value_loss
from verl.distributed.collectives import Axis
from verl.engine.base import LossOutput
from verl.protocol import DataProto

Columns = dict[str, Tensor]


class Objective:
    """A loss function of the engine that also knows which columns it reads."""

    def columns(self, available: set[str]) -> list[str]:
        """Choose the batch columns to pack for it."""
        raise NotImplementedError

    def begin(self, mini_batch: DataProto, infer: Callable[[], Columns], data: Axis) -> None:
        """Begin a mini-batch: add the columns that depend on the whole of it.

        Every rank along `data` makes this call.

        Args:
            infer: compute its outputs, (B, R) each, by the weights before the update.
        """

    def restart(self) -> None:
        """Forget the passes over this mini-batch: they start again, because memory ran out."""

    def end(self) -> None:
        """End the passes over this mini-batch. Later calls look for rows that are not finite."""

    def __call__(self, outputs: Columns, columns: Columns, sequence: Tensor) -> LossOutput:
        raise NotImplementedError


class ValueObjective(Objective):
    """The clipped value loss of PPO."""

    def __init__(self, cliprange_value: float) -> None:
        self.cliprange_value = cliprange_value

    def columns(self, available: set[str]) -> list[str]:
        return ["values", "returns"]

    def __call__(self, outputs: Columns, columns: Columns, sequence: Tensor) -> LossOutput:
        result = clipped_value_loss(
            outputs["values"],
            columns["values"],
            columns["returns"],
            columns["weights"],
            cliprange_value=self.cliprange_value,
        )
        means = {f"critic/{name}": value for name, value in result.means.items()}
        return LossOutput(
            loss=result.loss, means=means, sums={"critic/vf_loss": result.loss.detach()}
        )


class LanguageModelObjective(Objective):
    """Cross-entropy of the response tokens: supervised fine-tuning."""

    def columns(self, available: set[str]) -> list[str]:
        return []

    def __call__(self, outputs: Columns, columns: Columns, sequence: Tensor) -> LossOutput:
        loss = -(outputs["log_probs"] * columns["weights"]).sum()
        return LossOutput(loss=loss, sums={"train/loss": loss.detach()})
