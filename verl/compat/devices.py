"""The device of this process, by verl 0.5's names."""

import torch

is_cuda_available: bool = torch.cuda.is_available()


def get_device_name() -> str:
    """Return "cuda" if a GPU is visible, else "cpu"."""
    return "cuda" if is_cuda_available else "cpu"


def get_device_id() -> int:
    """Return the number of the current GPU; 0 on a CPU."""
    return torch.cuda.current_device() if is_cuda_available else 0
