"""`torch.compile` of decoder layers, and of the layers of vision towers that read pictures of any
size, from outside: after checkpointing, before sharding.

Each layer's `forward` is compiled on its own. All layers of one kind have the same code and the
same shapes, so they share the graphs of the first one; the number of tokens is symbolic, so batches
do too. Packed attention stays outside the graphs: it reads the batch's layout from its
`PackingSlot`, which would otherwise be a constant of the graph. That is one graph break, which
leaves four graphs a layer: norm, projections with RoPE, output projection, the rest. FSDP2's hooks
and checkpointing stay around the compiled function and are not traced.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from verl.distributed.fsdp import decoder_layers
from verl.models.attention import IMPLEMENTATION, packed_attention
from verl.models.vision import text_body, towers_within
from verl.models.vision_attention import IMPLEMENTATION as WINDOWS
from verl.models.vision_attention import has_windows, window_attention
from verl.utils.errors import ConfigError
from verl.utils.logging import logger

# Families that `use_torch_compile=null` compiles on CUDA: an update takes a sixth less time on an
# H200 (Qwen2.5-1.5B), after 11 to 28 s of compiling.
FAMILIES = frozenset(
    {
        "gemma2",
        "gemma3_text",
        "llama",
        "mistral",
        "mixtral",
        "phi3",
        "qwen2",
        "qwen2_5_vl_text",
        "qwen2_moe",
        "qwen2_vl_text",
        "qwen3",
        "qwen3_moe",
        "qwen3_vl_text",
    }
)
KEY = "actor_rollout_ref.actor.use_torch_compile"
# For each function of a layer: with and without gradient, for every model of the process. At
# torch's limit of 8 a fourth model would run uncompiled, with no more than a warning.
_GRAPHS_PER_FUNCTION = 64


def apply_compile(module: nn.Module, device: torch.device, *, backend: str = "inductor") -> None:
    """Compile the decoder layers of `module` in place; each compiles when it is first called.

    Raises ConfigError where the backend cannot compile on this machine.
    """
    _check_backend(device, backend)
    torch._dynamo.config.recompile_limit = max(
        torch._dynamo.config.recompile_limit, _GRAPHS_PER_FUNCTION
    )
    # An epsilon is a constant, or it would be an input of every kernel as soon as `dynamic` is
    # asked for.
    torch._dynamo.config.specialize_float = True
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(packed_attention))
    AttentionInterface.register(WINDOWS, torch.compiler.disable(window_attention))

    model = next(part for part in module.modules() if isinstance(part, PreTrainedModel))
    layers = decoder_layers(text_body(model))
    of_towers = []
    for tower in towers_within(model):
        if has_windows(tower):
            of_towers += decoder_layers(tower)

    for number, layer in enumerate([*layers, *of_towers]):
        assert "forward" not in vars(layer), "these layers are compiled already"
        recompute: Any = None
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            # Newer releases of transformers recompute within `forward`, older ones around it; a
            # graph must lie within.
            recompute = layer._gradient_checkpointing_func
            layer.gradient_checkpointing = False
        message = f"{len(layers)} decoder layers are compiled ({backend})" if number == 0 else None
        compiled = _compiled(layer, backend, message)
        layer.forward = compiled if recompute is None else partial(recompute, compiled)


def _compiled(layer: nn.Module, backend: str, message: str | None) -> Callable[..., Any]:
    """Return the layer's forward, compiled at its first call; `message` is logged with its time."""
    # dynamic: the first batch would make its number of tokens a constant, the second compile
    # everything again.
    compiled: Callable[..., Any] = torch.compile(layer.forward, dynamic=True, backend=backend)
    is_first = True

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        if not is_first:
            return compiled(*args, **kwargs)

        is_first = False
        for part in layer.modules():
            # Set by FSDP2 for its hooks, which stay outside here. With it the tracer takes numbers
            # of the module, such as head_dim, for symbols: slower kernels, and twice the time to
            # compile.
            part._is_fsdp_managed_module = False  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        start = time.perf_counter()
        result = compiled(*args, **kwargs)
        if message is not None:
            logger.info("%s; the first took %.1f s forward.", message, time.perf_counter() - start)
        return result

    return forward


def _check_backend(device: torch.device, backend: str) -> None:
    """Compile something small, so that a missing compiler fails here rather than in a step."""

    def small(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x

    try:
        ones = torch.ones(8, device=device, requires_grad=True)
        torch.compile(small, backend=backend)(ones).sum().backward()
    except RuntimeError as error:  # torch's own errors of compiling are RuntimeErrors
        raise ConfigError(
            f"{KEY}=true needs a torch.compile that works on {device.type}, but backend "
            f"'{backend}' failed: {str(error).strip().splitlines()[0]} On a CPU it needs a C++ "
            f"compiler (g++), on CUDA Triton and a C compiler. Install them, or set {KEY}=false."
        ) from error
