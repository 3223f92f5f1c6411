"""The tokens and log-probs that the steps of a CUDA device draw, and their way to the host."""

from collections.abc import Callable

import torch
from torch import Tensor

from verl.rollout.embedded.samples import Answer

_TOKEN_BYTES = 8  # int64
_ROW_BYTES = _TOKEN_BYTES + 4  # with its log-prob in fp32


class DrawnRows:
    """The draws of up to `rows` rows, at fixed addresses.

    They are in one tensor, because the cost of its copy to the host is the launch.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._bytes = torch.zeros(rows * _ROW_BYTES, dtype=torch.uint8, device=device)
        self.tokens, self.log_probs = _split(self._bytes)

    @property
    def num_bytes(self) -> int:
        """Return the bytes on the device."""
        return self._bytes.nbytes

    def fetch(self, count: int) -> Callable[[], Answer]:
        """Start the copy of the first `count` rows, which have arrived after an event recorded next."""
        tokens, log_probs = _split(arriving(self._bytes))
        return lambda: (tokens[:count].numpy(), log_probs[:count].numpy())


def arriving(tensor: Tensor) -> Tensor:
    """Start the copy of a tensor to the host, which may wait for an event that is recorded next."""
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)


def _split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens (b,) and the log-probs (b,) in the bytes of b rows."""
    end = len(rows) // _ROW_BYTES * _TOKEN_BYTES
    return rows[:end].view(torch.int64), rows[end:].view(torch.float32)
