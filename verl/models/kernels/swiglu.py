"""The gated MLP of Llama-like models with SwiGLU fused into the product of gate and up.

It needs quack-kernels, on Hopper and newer. On an H200, 32,768 tokens of a 1.5B model take 2.56 ms;
the two products alone take 2.85 ms, and 3.25 ms with a separate SwiGLU. It is used only in passes
without gradients: an update, which must keep both products, took 1.6 % longer with it. Nothing is
rounded between product and SwiGLU, so a log-prob of such a pass differs from the update's by
rounding, as is the case for compiled layers with and without gradients.

The embedded engine uses it for many rows, too.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from verl.models.copies import is_copy
from verl.utils.imports import is_installed, require
from verl.utils.logging import logger

# Largest ratio of the norm of the difference to float32 to the norm. Rounding to 16 bits explains
# so much.
_TOLERANCE = 1e-2


def is_available(device: torch.device) -> bool:
    """Return whether the kernel is installed and supports the device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    is_supported = torch.cuda.get_device_capability()[0] in (9, 10)
    return is_supported and is_installed("quack-kernels")


@cache
def is_usable(device: torch.device, hidden: int, intermediate: int) -> bool:
    """Return whether `gated_product` is available and agrees with PyTorch for MLPs of this size.

    The log has the result.
    """
    return is_available(device) and _is_proved(device, hidden, intermediate)


def use_fused_swiglu(model: nn.Module, device: torch.device) -> int:
    """Use the kernel in Llama's MLPs within `model`, in passes without gradients.

    It must be installed and agree with PyTorch; the log has the result. Returns the number of MLPs.
    A second call changes nothing.
    """
    mlps: list[Any] = []
    if is_available(device):
        mlps = [part for part in model.modules() if _is_known(part)]
    sizes = {(mlp.gate_proj.in_features, mlp.gate_proj.out_features) for mlp in mlps}
    if not all(_is_proved(device, *size) for size in sizes):
        return 0
    for mlp in mlps:
        mlp.forward = partial(_forward, mlp, mlp.forward)
    return len(mlps)


def _is_known(part: Any) -> bool:
    """Return whether a module has the code of Llama's MLP, without biases and adapters."""
    parts = ("gate_proj", "up_proj", "act_fn")
    if "forward" in vars(part) or not all(hasattr(part, name) for name in parts):
        return False
    linears = (part.gate_proj, part.up_proj)
    if any(type(linear) is not nn.Linear or linear.bias is not None for linear in linears):
        return False
    is_silu = getattr(getattr(part, "config", None), "hidden_act", None) in ("silu", "swish")
    return is_silu and is_copy(type(part).forward, LlamaMLP.forward)


def _forward(mlp: Any, original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    known = x.dtype in (torch.bfloat16, torch.float16) and x.dtype == mlp.gate_proj.weight.dtype
    if torch.is_grad_enabled() or not known:
        return original(x)
    return mlp.down_proj(swiglu(x, mlp.gate_proj.weight, mlp.up_proj.weight))


@torch.library.custom_op("verl::swiglu", mutates_args=())
def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(x @ gate.T) * (x @ up.T) without gradients.

    x (..., H), gate and up (I, H) -> (..., I).
    """
    out = gated_product(x.flatten(0, -2), torch.cat([gate, up]))
    return out.view(*x.shape[:-1], gate.shape[0])


@swiglu.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], gate.shape[0])


def gated_product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute silu(x G^T) * (x U^T) (M, I) of x (M, H) and `weight` (2 I, H), G above U."""
    _, out = _kernel()(
        x,
        weight.t(),
        activation="swiglu",
        store_preact=False,
        tuned=False,
        concat_layout=("B",),
    )
    return out


@cache
def _kernel() -> Callable[..., tuple[Tensor | None, Tensor]]:
    # Release 0.6.5 computes a key of every object that a kernel's functions refer to, and has none
    # for the logger of its kernel language. A logger changes no number, so its name is enough.
    # (With nvidia-cutlass-dsl 4.8 or later, further objects lack keys.)
    if not hasattr(logging.Logger, "__quack_semantic_key__"):
        logging.Logger.__quack_semantic_key__ = lambda self: self.name  # pyright: ignore[reportAttributeAccessIssue]
    interface = require(
        "quack.gemm_interface", "A fused SwiGLU", "pip install 'quack-kernels[cu13]>=0.6'"
    )
    return interface.gemm_gated


@cache
def _is_proved(device: torch.device, hidden: int, intermediate: int) -> bool:
    """Return whether the kernel runs here and agrees with PyTorch, for one size of MLP.

    The result is logged once.
    """
    try:
        # A new thread has none of the modes that the caller may have set.
        with ThreadPoolExecutor(1) as thread:
            difference = thread.submit(_difference, device, hidden, intermediate).result()
    except Exception as error:  # noqa: BLE001 - the compiler of a kernel may raise anything
        logger.warning("MLP: quack-kernels do not run here (%s); PyTorch's products instead", error)
        return False

    if not difference <= _TOLERANCE:
        logger.warning(
            "MLP: quack-kernels differ from PyTorch by %.1e; PyTorch's products instead", difference
        )
        return False

    logger.info(
        "MLP: SwiGLU within its products (quack-kernels); within %.0e of float32", difference
    )
    return True


def _difference(device: torch.device, hidden: int, intermediate: int) -> float:
    """Compute the norm of the difference to the output in float32, relative to its norm."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).bfloat16()

    # Fewer columns take less memory; the last tile is as full as with all of them.
    intermediate = min(intermediate, 768 + intermediate % 192)
    x = draw(1, 333, hidden)
    gate = draw(intermediate, hidden) / hidden**0.5
    up = draw(intermediate, hidden) / hidden**0.5

    exact = F.silu(x.float() @ gate.float().t())
    exact = exact * (x.float() @ up.float().t())
    return ((swiglu(x, gate, up) - exact).norm() / exact.norm()).item()
