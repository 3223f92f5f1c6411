"""Prepare a module for training, step by step, in the order that the steps need."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from verl.distributed.fsdp import apply_fsdp
from verl.distributed.mesh import Mesh
from verl.distributed.offload import apply_activation_offload
from verl.distributed.sequence_parallel import apply_sequence_parallel
from verl.engine.compile import apply_compile
from verl.engine.options import EngineOptions
from verl.engine.state import transformer_of
from verl.models.attention import apply_checkpointing
from verl.models.grouped_experts import use_grouped_experts
from verl.models.kernels.swiglu import use_fused_swiglu
from verl.models.rope import use_fast_rope
from verl.models.vision import language_layers


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The choices that `apply_to_module` made by looking at the module and its device."""

    keeps_gathered: bool = False  # see `verl.distributed.fsdp.keeps_gathered`
    fused_mlp: bool = False


def apply_to_module(module: nn.Module, mesh: Mesh, options: EngineOptions) -> Applied:
    """Apply sequence parallelism, checkpointing, off-load of activations, compile and sharding.

    Each step works in place, on the result of the steps before.
    """
    hf_model: Any = module.model
    compiles = options.compiles(hf_model.config.get_text_config().model_type)
    if options.on_cuda:
        use_fast_rope(module)
    use_grouped_experts(transformer_of(hf_model))
    # Layers that are not compiled compute the same bits with and without gradients.
    fused_mlps = 0
    if options.use_fused_kernels and compiles:
        fused_mlps = use_fused_swiglu(module, mesh.device)

    if mesh.sequence.size > 1:
        apply_sequence_parallel(module, mesh.sequence)
    # Checkpointing before sharding: the recomputed forward must find the weights gathered by the
    # layer's own hooks.
    if options.enable_gradient_checkpointing:
        share = options.gradient_checkpointing_share
        apply_checkpointing(transformer_of(hf_model), share=share)
    if options.enable_activation_offload:
        apply_activation_offload(module, mesh.device)
    if compiles:
        apply_compile(module, mesh.device, backend=options.compile_backend)

    keeps_gathered = False
    if mesh.weights is not None:
        keeps_gathered = apply_fsdp(
            module,
            language_layers(module),
            mesh.weights,
            options.fsdp_config,
            compute_dtype=options.compute_dtype,
        )
    return Applied(keeps_gathered=keeps_gathered, fused_mlp=fused_mlps > 0)
