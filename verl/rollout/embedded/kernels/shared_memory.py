"""The shared memory of a multiprocessor, of which a kernel's programs take a part each."""

import math
from functools import cache

import torch


@cache
def shared_memory(device: torch.device) -> float:
    """Return the most bytes that a program can have: 227 KiB on Hopper, 99 on desktop cards."""
    if device.type != "cuda":
        return math.inf  # interpreted
    # AMD's devices have no such property in torch.
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 64 * 1024)
