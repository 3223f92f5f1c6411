"""Find operations with results that may depend on the rest of the batch.

Run once, over a small forward of a model that `invariant` has prepared.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl.utils.errors import ConfigError

SETTING = "actor_rollout_ref.rollout.deterministic=true"

P = ParamSpec("P")
R = TypeVar("R")

# Operations that move rows, or compute each of them by itself, on any device.
_ROW_WISE = {
    "_fused_rms_norm",
    "_log_softmax",
    "_softmax",
    "_to_copy",
    "_unsafe_view",
    "amax",
    "amin",
    "arange",
    "argmax",
    "cat",
    "clone",
    "contiguous",
    "copy_",
    "embedding",
    "empty",
    "empty_like",
    "fill_",
    "full",
    "gather",
    "index",
    "index_add_",
    "index_copy_",
    "index_select",
    "layer_norm",
    "lift_fresh",
    "log_softmax",
    "native_layer_norm",
    "new_empty",
    "new_zeros",
    "ones_like",
    "repeat",
    "rms_norm",
    "scatter_",
    "softmax",
    "stack",
    "topk",
    "where",
    "zero_",
    "zeros",
    "zeros_like",
}
# Over the last dimension these are sums of a row; on CUDA their order depends on the number of
# rows.
_SUMS = {"sum", "mean", "var", "logsumexp", "cumsum"}
# Element-wise functions that give the same bits in the vectors and at the end of an array on CPU,
# as silu, gelu, sigmoid, general powers and others do not.
_SAME_AT_THE_END = {
    "abs",
    "add",
    "addcdiv",
    "addcmul",
    "bitwise_not",
    "clamp",
    "clamp_max",
    "clamp_min",
    "cos",
    "div",
    "eq",
    "erf",
    "exp",
    "ge",
    "gt",
    "le",
    "log",
    "log1p",
    "log2",
    "logical_not",
    "lt",
    "masked_fill",
    "maximum",
    "minimum",
    "mul",
    "ne",
    "neg",
    "reciprocal",
    "relu",
    "rsqrt",
    "rsub",
    "sin",
    "sqrt",
    "square",
    "sub",
    "tanh",
}


class Audit(TorchDispatchMode):
    trusted = 0  # depth of calls into `trusted` functions

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if Audit.trusted or func.namespace != "aten" or _is_row_wise(func, args, kwargs):
            return func(*args, **kwargs)
        with self:
            parts = NotImplemented
            if func._can_decompose():
                parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        self.found.add(func.overloadpacket.__name__)
        return func(*args, **kwargs)


def trusted(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude the operations inside `function` from the audit."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        Audit.trusted += 1
        try:
            return function(*args, **kwargs)
        finally:
            Audit.trusted -= 1

    return call


def is_last(dim: Any, x: Tensor) -> bool:
    dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
    return dims in ([-1], [x.ndim - 1])


def _is_row_wise(func: Any, args: Any, kwargs: Any) -> bool:
    name = func.overloadpacket.__name__
    tensors = [
        item for item in tree_leaves(args) if isinstance(item, Tensor) and item.is_floating_point()
    ]
    if not tensors or name in _ROW_WISE or func.is_view:
        return True
    if name in ("bmm", "mm"):
        return tensors[0].shape[-1] == 1  # rotary angles: a product of two numbers has no order
    if tensors[0].is_cuda:
        return torch.Tag.pointwise in func.tags

    name = name.removesuffix("_")
    if tensors[0].dtype in (torch.bfloat16, torch.float16) and (
        name == "rsqrt" or kwargs.get("alpha", 1) != 1
    ):
        return False

    if name in _SUMS:
        return len(args) > 1 and is_last(args[1], tensors[0])
    return name in _SAME_AT_THE_END or (
        name == "pow" and not isinstance(args[1], Tensor) and args[1] in (0.5, 2, 3)
    )


@contextmanager
def refuse_variant_operations(family: str) -> Iterator[None]:
    """Audit one forward of a model after `make_invariant`, inside the context.

    Raises ConfigError that names every operation with results that may depend on the batch.
    """
    audit = Audit()
    with audit:
        yield
    if audit.found:
        found = ", ".join(sorted(audit.found))
        raise ConfigError(
            f"{SETTING} is not possible for the model family '{family}': the result of "
            f"{found} for one sample may depend on the rest of the batch. Turn it off, or use a "
            "family such as Llama, Qwen, Mistral, Gemma or Phi."
        )
