"""Random batches of trajectories, and a loss whose gradient reaches every token."""

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
    """Rows of these lengths. Equal seeds give equal tokens and columns in equal rows, whatever the
    padding.

    `extra_padding` more columns of padding on either side. One response token in five is masked (as
    if a tool said it).
    """
    width_p = max(prompt for prompt, _ in shapes) + extra_padding
    width_r = max(response for _, response in shapes) + extra_padding
    columns: dict[str, torch.Tensor] = {
        "input_ids": torch.zeros(len(shapes), width_p + width_r, dtype=torch.int64),
        "attention_mask": torch.zeros(len(shapes), width_p + width_r, dtype=torch.int64),
        "response_mask": torch.zeros(len(shapes), width_r, dtype=torch.int64),
        # Padding is filled with something that spoils any result it gets into.
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
    """Nonlinear in the log-probs, never flat, and smooth, so that rounding cannot flip a clip."""
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
    """Copies of the accumulated gradients, whole and on the CPU, by parameter name."""
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
    """All accumulated gradients in one CPU vector."""
    return torch.cat([gradient.flatten() for gradient in gradients_of(engine).values()])


def moments_of(engine: TrainEngine) -> list[torch.Tensor]:
    """Every tensor of the optimizer's state."""
    assert engine.optimizer is not None
    return [value for state in engine.optimizer.state.values() for value in state.values()]
