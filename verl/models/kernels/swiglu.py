"""The gated MLP of Llama-like models with SwiGLU inside the product of gate and up: quack-kernels,
on Hopper and newer.

On an H200, 32,768 tokens of a 1.5B model: 2.56 ms, where the two products alone take 2.85 and with
the SwiGLU behind them 3.25. Only in passes without gradients: those of an update, where both
products must be kept, took 1.6 % longer with it. Nothing is rounded between product and SwiGLU: a
log-prob of such a pass differs from the update's by rounding, as those of compiled layers with and
without gradients do anyway.
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

# Norm of the difference to float32 over the norm: what rounding to 16 bits explains.
_TOLERANCE = 1e-2


def is_there(device: torch.device) -> bool:
    """Whether the kernel is installed, and the card one of its kind."""
    if (
        device.type != "cuda"
        or not torch.cuda.is_available()
        or torch.cuda.get_device_capability()[0] not in (9, 10)
    ):
        return False
    return is_installed("quack-kernels")


def use_fused_swiglu(model: nn.Module, device: torch.device) -> int:
    """Have the MLPs within `model` that are Llama's, on a CUDA `device`, computed by the kernel in
    passes without gradients, where it is installed and gives what PyTorch gives, which the log
    says. Gives how many. Twice changes nothing."""
    mlps: list[Any] = (
        [part for part in model.modules() if _is_known(part)] if is_there(device) else []
    )
    sizes = {(mlp.gate_proj.in_features, mlp.gate_proj.out_features) for mlp in mlps}
    if not all(_is_proved(device, *size) for size in sizes):
        return 0
    for mlp in mlps:
        mlp.forward = partial(_forward, mlp, mlp.forward)
    return len(mlps)


def _is_known(part: Any) -> bool:
    """Whether a module is Llama's MLP, to the letter, with plain matrices: no bias, no adapters."""
    if "forward" in vars(part) or not all(
        hasattr(part, name) for name in ("gate_proj", "up_proj", "act_fn")
    ):
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
    """silu(x @ gate.T) * (x @ up.T): x (..., H), gate and up (I, H) -> (..., I), without
    gradients."""
    weight = torch.cat([gate, up])
    _, out = _kernel()(
        x.flatten(0, -2),
        weight.t(),
        activation="swiglu",
        store_preact=False,
        tuned=False,
        concat_layout=("B",),
    )
    return out.view(*x.shape[:-1], gate.shape[0])


@swiglu.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], gate.shape[0])


@cache
def _kernel() -> Callable[..., tuple[Tensor | None, Tensor]]:
    # Release 0.6.5 makes keys of all that a kernel's functions refer to, and knows none for the
    # logger of the language that it is written in: what a logger does changes no number. (From
    # release 4.8 of nvidia-cutlass-dsl on, there is more that it has no keys for.)
    if not hasattr(logging.Logger, "__quack_semantic_key__"):
        logging.Logger.__quack_semantic_key__ = lambda self: self.name  # pyright: ignore[reportAttributeAccessIssue]
    interface = require(
        "quack.gemm_interface", "A fused SwiGLU", "pip install 'quack-kernels[cu13]>=0.6'"
    )
    return interface.gemm_gated


@cache
def _is_proved(device: torch.device, hidden: int, intermediate: int) -> bool:
    """Whether the kernel runs here and gives what PyTorch gives, for one size of MLP. It is said in
    the log, once."""
    try:
        # A thread of its own, which is in no mode that the caller may be in.
        with ThreadPoolExecutor(1) as thread:
            difference = thread.submit(_difference, device, hidden, intermediate).result()
    except Exception as error:  # noqa: BLE001 - a kernel that compiles itself fails in ways of its own
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
    """How far the output is from that in float32: the norm of the difference over the norm."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((1, 333, hidden), (intermediate, hidden), (intermediate, hidden))
    x, gate, up = (
        torch.randn(shape, device=device, generator=generator).bfloat16() for shape in shapes
    )
    gate = gate / hidden**0.5
    up = up / hidden**0.5
    exact = F.silu(x.float() @ gate.float().t()) * (x.float() @ up.float().t())
    return ((swiglu(x, gate, up) - exact).norm() / exact.norm()).item()
