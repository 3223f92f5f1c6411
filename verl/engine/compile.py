"""`torch.compile` of decoder layers, and of the layers of vision towers that read pictures of any
size, from outside: after checkpointing, before sharding.

Each layer's `forward` is compiled on its own. All layers of one kind have the same code and the
same shapes, so they share the graphs of the first one; the number of tokens is symbolic, so batches
do too. Packed attention stays outside the graphs: it reads the batch's layout from its
`PackingSlot`, which would otherwise be a constant of the graph. That is one graph break, which
leaves four graphs a layer: norm, projections with RoPE, output projection, the rest. FSDP2's hooks
and checkpointing stay around the compiled function and are not traced.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from verl.models.compiled import compiled_forward, prepare_compiler, tower_layers
from verl.models.vision import language_layers
from verl.utils.errors import ConfigError

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


def apply_compile(module: nn.Module, device: torch.device, *, backend: str = "inductor") -> None:
    """Compile the decoder layers of `module` in place; each compiles when it is first called.

    Raises ConfigError where the backend cannot compile on this machine.
    """
    _check_backend(device, backend)
    prepare_compiler()
    layers = language_layers(module)

    for number, layer in enumerate([*layers, *tower_layers(module)]):
        assert "forward" not in vars(layer), "these layers are compiled already"
        recompute: Any = None
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            # Newer releases of transformers recompute within `forward`, older ones around it; a
            # graph must lie within.
            recompute = layer._gradient_checkpointing_func
            layer.gradient_checkpointing = False
        message = f"{len(layers)} decoder layers are compiled ({backend})" if number == 0 else None
        compiled = compiled_forward(layer, backend, message)
        layer.forward = compiled if recompute is None else partial(recompute, compiled)


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
