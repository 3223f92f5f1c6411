"""Choose the transport between two processes by machine, GPU and process."""

import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from verl.utils.errors import RolloutError

Transport = Literal["direct", "ipc", "broadcast", "host", "disk"]


@dataclass(frozen=True)
class Endpoint:
    """Where weights are trained or used.

    GPUs are identified by UUID, since their numbers differ between processes.
    """

    machine: str
    process: int
    gpu: str | None = None  # UUID; None: a CPU
    host: str = "127.0.0.1"  # address at which other machines reach this one
    dtype: torch.dtype | None = None  # of the weights that a receiver keeps
    unreachable_gpus: tuple[str, ...] = ()  # UUIDs; seen here, without peer access to `gpu`

    @classmethod
    def here(cls, device: torch.device, dtype: torch.dtype | None = None) -> "Endpoint":
        """Describe this process."""
        on_gpu = device.type == "cuda"
        return cls(
            machine=_machine(),
            process=os.getpid(),
            gpu=gpu_uuid(device) if on_gpu else None,
            host=socket.gethostname(),
            dtype=dtype,
            unreachable_gpus=_unreachable_gpus(device) if on_gpu else (),
        )


def choose_transport(sender: Endpoint, receiver: Endpoint) -> tuple[Transport, str]:
    """Choose the fastest way from one to the other; return it with the reason."""
    if sender.machine != receiver.machine:
        return "broadcast", "they are on two machines"
    if sender.process == receiver.process:
        return "direct", "both are in one process"
    if sender.gpu is not None and sender.gpu == receiver.gpu:
        # NCCL refuses to serve two ranks of one GPU.
        return "ipc", f"two processes on one GPU, {sender.gpu}"
    if sender.gpu is None or receiver.gpu is None:
        return "host", "two processes of one machine, not both on a GPU"
    if receiver.gpu in sender.unreachable_gpus:
        return "host", "two GPUs of one machine without peer access"
    return "broadcast", "two GPUs of one machine"


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def device_of(uuid: str) -> torch.device:
    """Return this process's device for a GPU. Raises RolloutError if the GPU is not visible."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    seen = list(map(gpu_uuid, devices))
    if uuid not in seen:
        raise RolloutError(
            f"The weights lie on the GPU {uuid}, and this process sees "
            f"{', '.join(seen) or 'none'}. Add it to CUDA_VISIBLE_DEVICES (in any order), or set "
            "actor_rollout_ref.rollout.weight_transport=host."
        )
    return torch.device("cuda", seen.index(uuid))


def _unreachable_gpus(device: torch.device) -> tuple[str, ...]:
    """Return the UUIDs of visible GPUs to which `device` has no peer access."""
    unreachable = []
    for index in range(torch.cuda.device_count()):
        other = torch.device("cuda", index)
        if other != device and not torch.cuda.can_device_access_peer(device, other):
            unreachable.append(gpu_uuid(other))
    return tuple(unreachable)


def _machine() -> str:
    """Return a text that differs between machines, even if containers have equal names."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    boot_id = boot.read_text().strip() if boot.exists() else ""
    return f"{platform.node()} {boot_id}"
