"""The device of this process, and its peak memory."""

import os
from collections.abc import Callable

import torch

from verl.utils.errors import ConfigError
from verl.utils.peaks import phase_peaks
from verl.utils.units import GIB

ALLOCATOR_SETTINGS = "PYTORCH_CUDA_ALLOC_CONF"


def visible_device(requested: str | None = None) -> torch.device:
    """Return the requested device; None and "auto" select the current CUDA device, else the CPU.

    Raises ConfigError if "cuda" is requested and torch sees no GPU.
    """
    use_expandable_segments()
    if requested in (None, "auto", "cuda"):
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        if requested == "cuda":
            raise ConfigError(
                f"trainer.device=cuda needs a GPU, but PyTorch {torch.__version__} (CUDA build: "
                f"{torch.version.cuda}) sees none. Leave trainer.device unset to train on the CPU."
            )
        return torch.device("cpu")
    return torch.device(requested)


def use_expandable_segments() -> None:
    """Turn on expandable segments in CUDA's allocator, unless the user has configured it.

    Batches of varying lengths fragment segments of fixed size, and no memory plan accounts for the
    holes. CUDA reads the setting on first use; child processes inherit it.
    """
    if os.environ.keys().isdisjoint(("PYTORCH_ALLOC_CONF", ALLOCATOR_SETTINGS)):
        os.environ[ALLOCATOR_SETTINGS] = "expandable_segments:True"


def send(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy `tensor` to `device` without waiting for the copy.

    A copy from pageable memory would start only after all queued work, and block the host until
    then. Host tensors are therefore pinned first.
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def leave_free(share: float, device: torch.device) -> None:
    """Give up the memory that torch keeps for later, if less than `share` of the device is free.

    Such memory is in use for other processes.
    """
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if free < share * total:
        torch.cuda.empty_cache()


def describe_device(device: torch.device) -> str:
    """Describe the device in one line for the log: its name and memory."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{device} ({properties.name}, {properties.total_memory / GIB:.0f} GiB)"
    return f"cpu ({torch.get_num_threads()} threads)"


def memory_metrics(device: torch.device, largest: Callable[[int], int] = int) -> dict[str, float]:
    """Return the accelerator's peak memory since the last call, in GiB; 0 on a CPU.

    The metric names end in "gb" because verl's users plot them under these names.

    Args:
        largest: returns the largest of a number over several ranks; by default this rank's own.
    """
    if device.type != "cuda":
        return {"perf/max_memory_allocated_gb": 0.0, "perf/max_memory_reserved_gb": 0.0}
    allocated, reserved = phase_peaks.take(device)
    return {
        "perf/max_memory_allocated_gb": largest(allocated) / GIB,
        "perf/max_memory_reserved_gb": largest(reserved) / GIB,
    }
