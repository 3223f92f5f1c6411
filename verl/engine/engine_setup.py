"""The options of a `TrainEngine` in the terms that its memory depends on."""

from dataclasses import dataclass, replace

import torch

from verl.config import FSDPConfig
from verl.distributed.fsdp import gathered_fits
from verl.engine.model_shape import ModelShape
from verl.engine.options import EngineOptions
from verl.models.families import LLAMA_FAMILIES
from verl.models.kernels import swiglu
from verl.models.logprobs import fused_head


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """Hold the options of a `TrainEngine` in the terms that memory depends on."""

    on_cuda: bool = True
    shards: bool = True  # FSDP2; False: a plain module, one process on a CPU
    shard_ranks: int = 1  # that hold one copy of the weights
    compute_itemsize: int = 2
    fused_head: bool = False  # log-probs without gradient need no logits
    keeps_gathered: bool = False  # all weights, from the first pass of a mini-batch to its last
    compiled: bool = True
    fused_mlp: bool = False  # without gradient SwiGLU is within the product of gate and up
    checkpointing_share: float = 0.0  # of the layers; 0: none recomputes
    activation_offload: bool = False
    optimizer: str | None = "AdamW"
    param_offload: bool = False
    optimizer_offload: bool = False
    offload_policy: bool = False

    @classmethod
    def of(
        cls,
        options: EngineOptions,
        shape: ModelShape,
        ranks: int,
        *,
        fused_mlp: bool,
        keeps_gathered: bool = False,
    ) -> "EngineSetup":
        """Translate the options of an engine over `shape`.

        Args:
            options: see `EngineOptions`.
            shape: the model.
            ranks: ranks of the role.
            fused_mlp: see `Applied`, or `fuses_mlp` for an engine to come.
            keeps_gathered: see `Applied`, or `gathers_once` for an engine to come.
        """
        fsdp = options.fsdp_config
        parameter_itemsize = shape.weights[0].itemsize
        shard_ranks = options.shard_ranks(ranks, parameter_itemsize)
        compute_itemsize = options.compute_itemsize(parameter_itemsize)
        shards = shard_ranks is not None
        moves = shards and not fsdp.offload_policy
        # Without a visible card, a plan is for any card.
        may_fuse = options.on_cuda and compute_itemsize == 2 and torch.cuda.is_available()

        return cls(
            on_cuda=options.on_cuda,
            shards=shards,
            shard_ranks=shard_ranks or 1,
            compute_itemsize=compute_itemsize,
            fused_head=may_fuse and fused_head(options.device),
            keeps_gathered=keeps_gathered,
            compiled=options.compiles(shape.family),
            fused_mlp=fused_mlp,
            checkpointing_share=options.checkpointing_share,
            activation_offload=options.enable_activation_offload,
            optimizer=None if options.optim is None else options.optim.optimizer,
            param_offload=moves and fsdp.param_offload,
            optimizer_offload=moves and fsdp.optimizer_offload and options.learns,
            offload_policy=shards and fsdp.offload_policy,
        )


def fuses_mlp(options: EngineOptions, shape: ModelShape) -> bool:
    """Predict whether `use_fused_swiglu` will find an MLP that it can compute."""
    return (
        options.use_fused_kernels
        and options.compiles(shape.family)
        and shape.family in LLAMA_FAMILIES
        and not shape.is_adapted
        and swiglu.is_available(options.device)
    )


def gathers_once(
    shape: ModelShape, setup: EngineSetup, fsdp: FSDPConfig, device_bytes: int | None
) -> EngineSetup:
    """Add the choice of `verl.distributed.fsdp.keeps_gathered` to `setup`.

    Args:
        device_bytes: memory of the device; None: unknown.
    """
    if not setup.shards or setup.offload_policy:
        return setup
    if fsdp.reshard_after_forward is not None:
        # On several ranks False keeps them from the forward pass to the backward pass.
        return replace(setup, keeps_gathered=fsdp.reshard_after_forward is False)
    if setup.shard_ranks > 1 or not setup.on_cuda or device_bytes is None:
        return setup

    weights = [(weight.numel(), weight.itemsize, weight.trained) for weight in shape.weights]
    fits = gathered_fits(weights, setup.compute_itemsize, device_bytes)
    return replace(setup, keeps_gathered=fits)
