"""A faster rotary embedding for models of transformers on CUDA."""

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from verl.models.copies import is_copy

_NAME = "apply_rotary_pos_emb"
_LLAMAS = getattr(modeling_llama, _NAME)  # rotates whole heads, with their halves as pairs


def use_fast_rope(model: nn.Module) -> list[str]:
    """Use a kernel for rotary embeddings on CUDA in families that have Llama's embedding.

    This replaces a function of transformers' modules, so it affects all models of the family in
    this process. Returns the names of the modules. A second call changes nothing.
    """
    changed = []
    for name in sorted({type(part).__module__ for part in model.modules()}):
        if not name.startswith("transformers.models."):
            continue
        module = sys.modules[name]
        function = getattr(module, _NAME, None)
        if function is not None and is_copy(function, _LLAMAS):
            setattr(module, _NAME, _with_kernel(inspect.unwrap(function)))
            changed.append(name)
    return changed


@cache
def _with_kernel(original: Callable[..., Any]) -> Callable[..., Any]:
    # triton is installed only with CUDA
    kernels: Any = importlib.import_module("verl.models.kernels.rope")

    @wraps(original)
    def rotated(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        packed = q.is_cuda and q.shape[0] == unsqueeze_dim == q.stride(3) == k.stride(3) == 1
        if not packed or q.dtype == torch.float64 or cos.shape != (1, q.shape[2], q.shape[3]):
            return original(q, k, cos, sin, unsqueeze_dim)
        return kernels.rotate_heads(q, cos, sin, False), kernels.rotate_heads(k, cos, sin, False)

    return rotated
