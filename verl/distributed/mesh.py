"""The mesh: all ranks, and the axes along which they work."""

import atexit
import functools
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.distributed.collectives import ALONE, Axis
from verl.utils.errors import ConfigError
from verl.utils.launcher import launched_rank, launched_ranks
from verl.utils.rendezvous import env_store

_MEET_S = 1800.0  # PyTorch's own limit for ranks to find each other
REPLICATE_AXIS = "replicate"
SHARD_AXIS = "shard"
DATA_AXIS = "data"
SEQUENCE_AXIS = "sequence"
ROLLOUT_DATA_AXIS = "rollout_data"
ROLLOUT_TENSOR_AXIS = "rollout_tensor"


@dataclass(frozen=True)
class Mesh:
    """This process among all ranks.

    Ranks along `sequence` (neighbors) share the tokens of the same rows; ranks along `data` have
    different rows. Weights are split over `weights`, independently of the other axes: ("shard",)
    over all ranks, or ("replicate", "shard") where `fsdp_size` ranks hold one copy. None: one
    process, with whole weights.
    """

    device: torch.device
    world: Axis = ALONE
    data: Axis = ALONE
    sequence: Axis = ALONE
    weights: DeviceMesh | None = None


@dataclass(frozen=True)
class RolloutMesh:
    """This process among all ranks that generate, independent of how they train.

    Neighbors along `tensor` share one engine and its requests; ranks along `data` have requests of
    their own.
    """

    data: Axis = ALONE
    tensor: Axis = ALONE


def init_mesh(
    device: torch.device,
    *,
    fsdp_size: int = -1,
    sequence_parallel_size: int = 1,
    shard: bool = True,
) -> Mesh:
    """Make the mesh over all launched ranks: those of torchrun, or this process alone.

    Starts the default process group if it is missing: NCCL for CUDA tensors and gloo for CPU
    tensors. A single process keeps its store in memory, and needs no address and no environment. On
    CUDA a rank takes the device of its LOCAL_RANK.

    Args:
        device: of the ranks; its index is replaced.
        fsdp_size: ranks that hold one copy of the weights; below 1, or the number of ranks: all.
        sequence_parallel_size: ranks that share the tokens of a row.
        shard: False: a single process starts no process group. Several ranks always shard.

    Raises:
        ConfigError: a size does not divide the number of ranks, or torchrun's variables are
            incomplete.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else launched_ranks()
    _check_sizes(world_size, fsdp_size, sequence_parallel_size)
    device = _own_device(device)
    if world_size == 1 and not shard:
        return Mesh(device)
    if not dist.is_initialized():
        _start_process_group(device, world_size)
    return _build(device, fsdp_size, sequence_parallel_size)


def init_rollout_mesh(mesh: Mesh, tensor_parallel_size: int) -> RolloutMesh:
    """Group the ranks of `mesh` by `tensor_parallel_size` neighbors. Every rank must call it.

    Raises ConfigError where the size does not divide the number of ranks.
    """
    if tensor_parallel_size == 1:
        return RolloutMesh(mesh.world)
    _check_divides(
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        tensor_parallel_size,
        mesh.world.size,
    )
    return _build_rollout(mesh.device, tensor_parallel_size)


def close_process_group() -> None:
    """Undo `init_mesh`; meshes made before cannot be used afterwards."""
    _build.cache_clear()
    _build_rollout.cache_clear()
    _forget_meshes()
    if dist.is_initialized():
        dist.destroy_process_group()


def _forget_meshes() -> None:
    """Clear torch's cache of operations on sharded tensors, whose meshes hold process groups.

    The cache belongs to a thread. A process that is forked in another one frees it, and with it the
    last reference to a closed group, which then waits for threads that only the parent has: the
    child ends by SIGSEGV.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()


# Cached: the engines of actor, critic and reference share groups, and with them NCCL's buffers.
@functools.cache
def _build(device: torch.device, fsdp_size: int, sequence_parallel_size: int) -> Mesh:
    world = Axis(dist.get_world_size(), dist.get_rank())
    if 0 < fsdp_size < world.size:
        shape = (world.size // fsdp_size, fsdp_size)
        names = (REPLICATE_AXIS, SHARD_AXIS)
    else:
        shape = (world.size,)
        names = (SHARD_AXIS,)

    weights = init_device_mesh(device.type, shape, mesh_dim_names=names)
    if sequence_parallel_size == 1:
        return Mesh(device, world, world, ALONE, weights)
    return Mesh(
        device,
        world,
        *_two_axes(device, sequence_parallel_size, (DATA_AXIS, SEQUENCE_AXIS)),
        weights,
    )


@functools.cache
def _build_rollout(device: torch.device, tensor_parallel_size: int) -> RolloutMesh:
    return RolloutMesh(
        *_two_axes(device, tensor_parallel_size, (ROLLOUT_DATA_AXIS, ROLLOUT_TENSOR_AXIS))
    )


def _two_axes(device: torch.device, size: int, names: tuple[str, str]) -> tuple[Axis, Axis]:
    """Make two axes of all ranks; the second one has groups of `size` neighbors."""
    ranks = init_device_mesh(
        device.type, (dist.get_world_size() // size, size), mesh_dim_names=names
    )
    axes = []
    for number, name in enumerate(names):
        rank = ranks.get_local_rank(name)
        axes.append(Axis(ranks.size(number), rank, ranks.get_group(name)))

    outer, inner = axes
    return outer, inner


def _start_process_group(device: torch.device, world_size: int) -> None:
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        rank, _ = launched_rank()
        store = dist.PrefixStore("default_pg", env_store(_MEET_S))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)

    # NCCL warns about leaked communicators when a process ends without this.
    atexit.register(close_process_group)


def _own_device(device: torch.device) -> torch.device:
    """Return the device of this rank, made current on CUDA."""
    if device.type != "cuda":
        return device
    # LOCAL_RANK alone: a role may have one rank of many to itself.
    if launched_ranks() > 1 or "LOCAL_RANK" in os.environ:
        # A launcher that hides the other ranks' devices leaves one, which is number 0 on every
        # rank.
        visible = torch.cuda.device_count()
        index = int(os.environ.get("LOCAL_RANK", "0")) if visible > 1 else 0
        if index >= visible:
            raise ConfigError(
                f"Every rank needs a GPU of its own, but LOCAL_RANK={index} and {visible} are "
                f"visible. Launch --nproc_per_node={visible}."
            )
        device = torch.device("cuda", index)

    if device.index is not None:
        torch.cuda.set_device(device)
    return device


def _check_sizes(world_size: int, fsdp_size: int, sequence_parallel_size: int) -> None:
    _check_divides("ulysses_sequence_parallel_size", sequence_parallel_size, world_size)
    if 0 < fsdp_size < world_size and world_size % fsdp_size:
        raise ConfigError(
            f"fsdp_config.fsdp_size must divide the number of ranks, got {fsdp_size} and "
            f"{world_size}. Set it to one of {_divisors(world_size)}, or to -1 for all."
        )


def _check_divides(key: str, size: int, world_size: int) -> None:
    if world_size % size:
        raise ConfigError(
            f"{key} must divide the number of ranks, got {size} and {world_size}. Set it to one of "
            f"{_divisors(world_size)}."
        )


def _divisors(number: int) -> str:
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)
