"""Random batches of trajectories, and a loss with a gradient for every token."""

from collections.abc import Sequence

import numpy as np
import torch
from tensordict import TensorDict
from torch.distributed.tensor import DTensor

from tests.tiny_models import VOCABULARY
from verl.engine.base import LossOutput, TrainEngine
from verl.protocol import DataProto

Shape = tuple[int, int]  # prompt tokens, response tokens


def make_batch(shapes: Sequence[Shape], *, extra_padding: int = 0, seed: int = 0) -> DataProto:
    """Make random rows with these lengths; equal seeds give equal rows for any padding.

    `extra_padding` columns of padding are added on each side. One response token in five is masked,
    like a token of a tool.
    """
    width_p = max(prompt for prompt, _ in shapes) + extra_padding
    width_r = max(response for _, response in shapes) + extra_padding
    columns: dict[str, torch.Tensor] = {
        "input_ids": torch.zeros(len(shapes), width_p + width_r, dtype=torch.int64),
        "attention_mask": torch.zeros(len(shapes), width_p + width_r, dtype=torch.int64),
        "response_mask": torch.zeros(len(shapes), width_r, dtype=torch.int64),
        # NaN as padding makes its use in any result visible.
        "advantages": torch.full((len(shapes), width_r), float("nan"), dtype=torch.float64),
        "old_log_probs": torch.full((len(shapes), width_r), float("nan"), dtype=torch.float64),
    }

    for row, (prompt, response) in enumerate(shapes):
        draw = torch.Generator().manual_seed(1000 * seed + row)
        real = slice(width_p - prompt, width_p + response)
        columns["input_ids"][row, real] = torch.randint(
            3, VOCABULARY, (prompt + response,), generator=draw
        )
        columns["attention_mask"][row, real] = 1
        mask = torch.rand(response, generator=draw) > 0.2
        mask[0] = True
        columns["response_mask"][row, :response] = mask.long()
        columns["advantages"][row, :response] = torch.randn(
            response, generator=draw, dtype=torch.float64
        )
        columns["old_log_probs"][row, :response] = -3 * torch.rand(
            response, generator=draw, dtype=torch.float64
        )

    mask = columns["response_mask"]
    columns["weights"] = mask.double() / mask.sum()
    uids = np.array([f"prompt-{row // 2}" for row in range(len(shapes))], dtype=object)
    return DataProto(
        batch=TensorDict(columns, batch_size=[len(shapes)]), non_tensor_batch={"uid": uids}
    )


COLUMNS = ("advantages", "old_log_probs")


def smooth_loss(
    outputs: dict[str, torch.Tensor], columns: dict[str, torch.Tensor], sequence: torch.Tensor
) -> LossOutput:
    """Compute a smooth nonlinear loss of the log-probs, without clips that rounding could flip."""
    ratio = torch.sin(outputs["log_probs"] - columns["old_log_probs"])
    loss = -(
        columns["advantages"] * (outputs["log_probs"] + 0.5 * ratio) * columns["weights"]
    ).sum()
    return LossOutput(
        loss=loss,
        means={"ratio": ratio, "row": sequence.double()},
        sums={"loss": loss},
    )


def gradients_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Return full copies of the accumulated gradients on the CPU, by parameter name."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            found[name] = (
                (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
                .cpu()
                .clone()
            )
    return found


def flat_gradient(engine: TrainEngine) -> torch.Tensor:
    """Concatenate all accumulated gradients into one CPU vector."""
    return torch.cat([gradient.flatten() for gradient in gradients_of(engine).values()])


def moments_of(engine: TrainEngine) -> list[torch.Tensor]:
    """Return every tensor of the optimizer's state."""
    assert engine.optimizer is not None
    return [value for state in engine.optimizer.state.values() for value in state.values()]
