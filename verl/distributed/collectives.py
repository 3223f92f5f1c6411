"""The collectives that the package needs, each an identity in a world of one."""

import torch
import torch.distributed as dist


def world_size() -> int:
    """Ranks of the default process group; 1 where none was started."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of `tensor` over all ranks, in place where there are several. Every rank must call it."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor
