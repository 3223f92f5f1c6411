"""Shard any module with a list of layers by FSDP2, from outside, and get full tensors back."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from verl.config import FSDPConfig
from verl.distributed.collectives import Axis, gather_objects
from verl.utils.errors import ModelError

# On one rank gathered weights stay from pass to pass if they, parameters, gradients and AdamW's
# moments take no more than this share of the device. Copies and additions for it, in each of four
# passes, were 95 ms of an update's 1,490 on an H200 (Qwen2.5-1.5B).
GATHERED_SHARE = 0.5


def keeps_gathered(
    module: nn.Module, mesh: DeviceMesh, config: FSDPConfig, compute_dtype: torch.dtype | None
) -> bool:
    """Decide whether one rank with all shards gathers them once for all passes of a mini-batch.

    reshard_after_forward=False asks for it. By default it is done if the device has room.
    """
    if mesh.size() > 1 or config.offload_policy:
        return False
    if config.reshard_after_forward is not None or mesh.device_type != "cuda":
        return config.reshard_after_forward is False

    weights = [(each.numel(), each.itemsize, each.requires_grad) for each in module.parameters()]
    copy = None if compute_dtype is None else compute_dtype.itemsize
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return gathered_fits(weights, copy, total)


def gathered_fits(
    weights: Iterable[tuple[int, int, bool]], compute_itemsize: int | None, device_bytes: int
) -> bool:
    """Return whether a device has room for all weights of a model and their gathered copies.

    Args:
        weights: elements, bytes of an element, and whether it learns.
        compute_itemsize: bytes of an element of a copy; None: those of its weight.
    """
    needed = 0
    for numel, itemsize, learns in weights:
        kept = 4 if learns else 1  # itself, its gradient and two moments
        needed += numel * (itemsize * kept + (compute_itemsize or itemsize))
    return needed <= GATHERED_SHARE * device_bytes


def apply_fsdp(
    module: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    config: FSDPConfig,
    *,
    compute_dtype: torch.dtype | None = None,
) -> bool:
    """Shard `module` in place: one unit for each of `layers`, one for embeddings, norm and head.

    Returns whether weights stay gathered until `reshard` (see `keeps_gathered`).

    Parameters, moments and accumulated gradients keep the dtype of the parameters (fp32 when
    trained); forward and backward run in `compute_dtype` (None: as the parameters are). Gradients
    are reduced and added up in fp32, since adding 64 micro-batches in bf16 was measured 0.9 % off.
    They are summed over the ranks, never averaged: a loss has the denominators of the whole
    mini-batch already.

    With `offload_policy`, parameters, gradients and moments live on the host, where the optimizer
    steps. Parameters on the meta device get the values of the first rank, unit by unit.
    """
    fills = agree_on_weights(module)
    keep_gathered = keeps_gathered(module, mesh, config, compute_dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=None if compute_dtype is None else torch.float32
    )
    offload = OffloadPolicy()
    if config.offload_policy:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")

    def shard(unit: nn.Module, reshard_after_forward: bool) -> None:
        if fills:
            _fill(unit, torch.device(mesh.device_type))
        fully_shard(
            unit,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=reshard_after_forward,
        )

        assert isinstance(unit, FSDPModule)
        unit.set_reshard_after_backward(not keep_gathered, recurse=False)
        if mesh.size() == 1:
            reduction: Any = OneRankReduction()  # FSDP2's base class is private
            unit.set_custom_reduce_scatter(reduction)
        else:
            unit.set_gradient_divide_factor(1.0)
            # Otherwise division by 1 becomes a separate kind of reduction, which gloo lacks.
            unit.set_force_sum_reduction_for_comms(True)

    for layer in layers:
        shard(layer, config.reshard_after_forward is not False and not keep_gathered)
    # The rest is needed again at once in backward (the head is last in and first out), so it stays
    # gathered.
    shard(module, False)
    return keep_gathered


class OneRankReduction:
    """Reduce the gradients of a unit on the only rank: its buffer for them is the result.

    FSDP2 asks for two buffers of fp32 gradients and copies one into the other, which it takes on a
    CUDA stream of its own. Memory that a stream has once taken is not used by another, so the
    gradients of all units would take room from the next pass's activations: with 127 of 139 GiB in
    use, an H200 waited for the return of such memory for some 0.2 s of each update of 3 s.
    """

    def __init__(self) -> None:
        self._input: weakref.ref[torch.Tensor] | None = None

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer on the stream of the backward pass, and the same one as the result."""
        buffer = None if self._input is None else self._input()
        if buffer is None or buffer.shape != torch.Size(size):
            buffer = torch.empty(*size, dtype=dtype, device=device)
            # FSDP2 holds it until the result is there. After a pass that failed it is gone.
            self._input = weakref.ref(buffer)
            return buffer

        self._input = None
        if buffer.is_cuda:  # FSDP2's own stream may still add to it when Python drops it
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        return buffer

    def __call__(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a single rank has nothing to reduce")


def agree_on_weights(module: nn.Module) -> bool:
    """Return whether some rank has only the shapes of its parameters.

    Such parameters take the first rank's dtypes. Raises ModelError where shapes differ.
    """
    if not dist.is_initialized():
        return False

    mine = {}
    for name, parameter in module.named_parameters():
        mine[name] = (parameter.is_meta, parameter.shape, parameter.dtype)

    ranks = gather_objects(mine, Axis(dist.get_world_size(), dist.get_rank()))
    lacks_weights = []
    for parameters in ranks:
        lacks_weights.append(any(is_meta for is_meta, _, _ in parameters.values()))
    if not any(lacks_weights):
        return False

    first = ranks[0]
    assert not lacks_weights[0], "the first rank reads the weights for all"
    shapes = {(name, shape) for name, (_, shape, _) in mine.items()}
    expected = {(name, shape) for name, (_, shape, _) in first.items()}
    differ = sorted({name for name, _ in shapes ^ expected})
    if differ:
        raise ModelError(
            f"{len(differ)} parameters have other shapes on this rank than on the first, which "
            f"reads the weights for all, first {differ[0]}. Give every machine the same model "
            "folder."
        )

    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            parameter.data = parameter.data.to(first[name][2])
    return True


def _fill(unit: nn.Module, device: torch.device) -> None:
    """Broadcast the first rank's parameters and buffers of a unit that is not sharded yet.

    All of them are on `device` then. Every rank must call it.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}  # by old parameter: tied weights stay tied

    for module in unit.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if parameter not in replaced:
                if parameter.is_meta:
                    full = torch.empty_like(parameter, device=device)
                else:
                    full = parameter.detach().to(device)
                dist.broadcast(full, 0)
                replaced[parameter] = nn.Parameter(full, requires_grad=parameter.requires_grad)
            module._parameters[name] = replaced[parameter]

        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer = buffer.to(device)
                dist.broadcast(buffer, 0)


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of the largest `nn.ModuleList`: a transformer's blocks."""
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList)]
    return list(max(lists, key=_num_parameters, default=nn.ModuleList()))


def reshard(module: nn.Module) -> None:
    """Free the gathered weights of every unit.

    A forward pass without backward leaves some gathered, and the next forward pass would use them
    even after an optimizer step.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def recover(module: nn.Module) -> None:
    """Reset FSDP2 after an exception within a pass; the caller drops the gradients.

    Otherwise every unit would take the next forward pass for a recomputation, and leave its weights
    ungathered.
    """
    units = [child for child in module.modules() if isinstance(child, FSDPModule)]
    if not units:
        return
    root: Any = units[0]
    state: Any = root._get_fsdp_state()
    if state._is_root is None:  # no pass has come as far as the module yet
        return

    for unit in units:
        group: Any = unit._get_fsdp_state()._fsdp_param_group
        if group is None:
            continue
        for parameter in group.fsdp_params:
            # Of this pass, and of those before it whose gradients were not synchronized. From torch
            # 2.15 on, autograd has both.
            if "unsharded_accumulated_grad" in vars(parameter):
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None

    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:  # torch 2.11: do what autograd does at the end of a backward and of a forward pass
        state._root_post_backward_final_callback()
        state._state_ctx.iter_forward_root = None
    reshard(module)


def sync_gradients(module: nn.Module, enabled: bool) -> None:
    """Choose whether the next backward pass reduces all gradients so far into the parameters.

    Otherwise they are added up in fp32, which takes as much memory as all parameters: for one rank.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_requires_gradient_sync(enabled, recurse=False)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a possibly sharded tensor, detached.

    It is an alias where this rank has all of it: only read it. Where it is sharded over several
    ranks, all of them must call this.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.size() == 1:
        return tensor.to_local()
    # Shards on the host would be gathered by gloo, at a fraction of the speed.
    gathered: Any = tensor.to(tensor.device_mesh.device_type)
    return gathered.full_tensor()


def shard_like(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `full`, which every rank has, in the device, dtype and sharding of `like`."""
    if not isinstance(like, DTensor):
        return full.to(device=like.device, dtype=like.dtype)
    full = full.to(device=like.device_mesh.device_type, dtype=like.dtype)
    # No source rank: each takes its part of its own copy, and nothing is sent. Cloned, or a part
    # would keep the whole.
    sharded = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return (sharded.clone() if like.device_mesh.size() > 1 else sharded).to(like.device)


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
