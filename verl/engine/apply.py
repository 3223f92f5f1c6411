"""Prepare a module for training, step by step, in the order that the steps need."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from verl.config import FSDPConfig, OptimConfig
from verl.distributed.fsdp import apply_fsdp
from verl.distributed.mesh import Mesh
from verl.distributed.offload import apply_activation_offload
from verl.distributed.sequence_parallel import apply_sequence_parallel
from verl.engine.compile import apply_compile
from verl.engine.footprint import EngineSetup, engine_setup
from verl.engine.state import transformer_of
from verl.models.attention import apply_checkpointing
from verl.models.kernels.swiglu import use_fused_swiglu
from verl.models.rope import use_fast_rope


def apply_to_module(
    module: nn.Module,
    mesh: Mesh,
    optim: OptimConfig | None,
    fsdp: FSDPConfig,
    *,
    gradient_checkpointing: bool,
    checkpointing_share: float,
    activation_offload: bool,
    compute_dtype: torch.dtype | None,
    compile_backend: str | None,
    fused_kernels: bool,
) -> EngineSetup:
    """Apply sequence parallelism, checkpointing, off-load of activations, compile and sharding.

    Each step works in place, on the result of the steps before. Returns the settings that memory
    depends on. For the arguments see `TrainEngine`.
    """
    on_cuda = mesh.device.type == "cuda"
    hf_model: Any = module.model
    if compute_dtype is None and on_cuda:
        compute_dtype = torch.bfloat16
    if on_cuda:
        use_fast_rope(module)
    # Layers that are not compiled compute the same bits with and without gradients.
    fused_mlps = 0
    if fused_kernels and compile_backend is not None:
        fused_mlps = use_fused_swiglu(module, mesh.device)

    if mesh.sequence.size > 1:
        apply_sequence_parallel(module, mesh.sequence)
    # Checkpointing before sharding: the recomputed forward must find the weights gathered by the
    # layer's own hooks.
    if gradient_checkpointing:
        apply_checkpointing(transformer_of(hf_model), share=checkpointing_share)
    if activation_offload:
        apply_activation_offload(module, mesh.device)
    if compile_backend is not None:
        apply_compile(module, mesh.device, backend=compile_backend)

    setup = engine_setup(
        fsdp,
        optim,
        on_cuda=on_cuda,
        shard_ranks=None if mesh.weights is None else mesh.weights.size(-1),
        compute_itemsize=(compute_dtype or next(module.parameters()).dtype).itemsize,
        compiled=compile_backend is not None,
        fused_mlp=fused_mlps > 0,
        checkpointing_share=checkpointing_share if gradient_checkpointing else 0.0,
        activation_offload=activation_offload,
    )
    if mesh.weights is None:
        return setup
    keeps_gathered = apply_fsdp(module, mesh.weights, fsdp, compute_dtype=compute_dtype)
    return replace(setup, keeps_gathered=keeps_gathered)
