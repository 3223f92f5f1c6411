"""AdamW with moments of 8 bits (Dettmers et al. 2021, arXiv:2110.02861), by torchao.

Imported only when asked for.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torchao.optim import AdamW8bit as TorchaoAdamW8bit

from verl.distributed.fsdp import full_tensor
from verl.utils.errors import CheckpointError


class AdamW8bit(TorchaoAdamW8bit):
    """AdamW with a code of 8 bits for every element and a scale for every 256.

    Tensors below 4,096 elements keep fp32 moments.
    """

    def step(self, closure: None = None) -> None:
        # torchao compiles the arithmetic: one kernel on CUDA, but on CPU a need for a C++ compiler.
        on_cuda = any(
            parameter.is_cuda for group in self.param_groups for parameter in group["params"]
        )
        with nullcontext() if on_cuda else torch.compiler.set_stance("force_eager"):
            super().step()

    def moment_to_saved(self, whole: Any) -> Any:
        """Return plain tensors on the host: codes and scales, where the moment is in 8 bits."""
        if not hasattr(whole, "codes"):
            return whole.cpu()
        return {"codes": whole.codes.cpu(), "scale": whole.scale.cpu()}

    def moment_from_saved(self, key: str, saved: Any, parameter: torch.Tensor) -> torch.Tensor:
        """Undo `moment_to_saved`, bit for bit."""
        if key == "step":
            return saved  # counted on the host

        moment = self._new_buffer(parameter.detach(), signed=key == "exp_avg")
        whole: Any = full_tensor(moment)  # an alias: there is one rank
        if hasattr(whole, "codes") != isinstance(saved, dict):
            raise CheckpointError(
                "The checkpoint's moments are not in 8 bits. Set optim.optimizer as it was when "
                "they were saved."
            )
        if isinstance(saved, dict):
            whole.codes.copy_(saved["codes"])
            whole.scale.copy_(saved["scale"])
        else:
            whole.copy_(saved)
        return moment
