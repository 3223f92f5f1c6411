"""Layers whose `forward` is compiled by `torch.compile`, each at its first call."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from verl.distributed.fsdp import decoder_layers
from verl.models.attention import IMPLEMENTATION, packed_attention
from verl.models.vision import towers_within
from verl.models.vision_attention import IMPLEMENTATION as WINDOWS
from verl.models.vision_attention import has_windows, window_attention
from verl.utils.logging import logger

# For each function of a layer: with and without gradient, for every model of the process. At
# torch's limit of 8 a fourth model would run uncompiled, with no more than a warning.
_GRAPHS_PER_FUNCTION = 64


def prepare_compiler() -> None:
    """Prepare the compiler for graphs of layers, in the whole process."""
    torch._dynamo.config.recompile_limit = max(
        torch._dynamo.config.recompile_limit, _GRAPHS_PER_FUNCTION
    )
    # An epsilon is a constant, or it would be an input of every kernel as soon as `dynamic` is
    # asked for.
    torch._dynamo.config.specialize_float = True
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(packed_attention))
    AttentionInterface.register(WINDOWS, torch.compiler.disable(window_attention))


def tower_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of the vision towers within `module` that read pictures of any size."""
    layers = []
    for tower in towers_within(module):
        if has_windows(tower):
            layers += decoder_layers(tower)
    return layers


def compile_towers(model: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compile the layers of a rollout's vision towers in place."""
    layers = tower_layers(model)
    if not layers:
        return
    prepare_compiler()
    message = f"{len(layers)} layers of the rollout's vision tower are compiled"
    for number, layer in enumerate(layers):
        layer.forward = compiled_forward(layer, backend, message if number == 0 else None)


def compiled_forward(layer: nn.Module, backend: str, message: str | None) -> Callable[..., Any]:
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
