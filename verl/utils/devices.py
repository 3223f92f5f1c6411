"""Which device this process computes on, and how much of it was used."""

import os

import torch

from verl.utils.errors import ConfigError
from verl.utils.peaks import phase_peaks
from verl.utils.units import GIB as GIB

ALLOCATOR_SETTINGS = "PYTORCH_CUDA_ALLOC_CONF"


def visible_device(requested: str | None = None) -> torch.device:
    """The device asked for, or (None, "auto") the first visible one: CUDA when there is any, else
    CPU."""
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
    """Let CUDA's allocator grow the pieces of memory that it has, unless the user has configured
    it.

    Batches of ever other lengths leave holes between pieces of fixed sizes, which no plan of memory
    counts. Settled when CUDA is first used, and taken over by the processes that this one starts.
    """
    if os.environ.keys().isdisjoint(("PYTORCH_ALLOC_CONF", ALLOCATOR_SETTINGS)):
        os.environ[ALLOCATOR_SETTINGS] = "expandable_segments:True"


def send(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """`tensor` on `device`, without waiting for the copy. From memory that is not pinned CUDA
    copies once all work queued before is done, and the host waits for that."""
    pinned = tensor.device.type == "cpu" and torch.device(device).type == "cuda"
    return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=True)


def describe_device(device: torch.device) -> str:
    """One line for the log: name and memory of the device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{device} ({properties.name}, {properties.total_memory / GIB:.0f} GiB)"
    return f"cpu ({torch.get_num_threads()} threads)"


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Peak memory of the accelerator since the last call, in GB as verl's users plot it; 0 where
    there is none."""
    if device.type != "cuda":
        return {"perf/max_memory_allocated_gb": 0.0, "perf/max_memory_reserved_gb": 0.0}
    allocated, reserved = phase_peaks.take(device)
    return {
        "perf/max_memory_allocated_gb": allocated / GIB,
        "perf/max_memory_reserved_gb": reserved / GIB,
    }
