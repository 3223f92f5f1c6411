"""The device mesh: which ranks there are, and along which axes they work."""

import atexit
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.utils.errors import ConfigError

SHARD_AXIS = "shard"


def init_mesh(device: torch.device) -> DeviceMesh:
    """A mesh with the one axis `shard` over every rank, which today is this process alone.

    Starts the default process group if nobody has: NCCL for CUDA (with gloo beside it for CPU tensors), else gloo. A
    single process needs no address and no environment for it, since its store lives in its own memory.
    """
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1:
        raise ConfigError(
            f"Training runs in one process here, but WORLD_SIZE is {launched}. Launch with plain `python` instead of "
            "torchrun, or unset WORLD_SIZE."
        )
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        # NCCL warns about leaked communicators when a process ends without this.
        atexit.register(close_process_group)
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=(SHARD_AXIS,))


def close_process_group() -> None:
    """Undo `init_mesh`; meshes made before are useless afterwards."""
    if dist.is_initialized():
        dist.destroy_process_group()
