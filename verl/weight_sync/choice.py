"""Which transport fits two processes, by what is known of them."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from verl.utils.errors import RolloutError
from verl.utils.logging import logger

Transport = Literal["direct", "ipc", "broadcast", "host", "disk"]


@dataclass(frozen=True)
class Endpoint:
    """Where weights lie, or shall lie. A GPU is known by its UUID: its number is another one in
    every process."""

    machine: str
    process: int
    gpu: str | None = None  # UUID; None: a CPU

    @classmethod
    def here(cls, device: torch.device) -> "Endpoint":
        return cls(_machine(), os.getpid(), gpu_uuid(device) if device.type == "cuda" else None)


@dataclass(frozen=True)
class Link:
    """What two processes can do with each other."""

    process_group: bool  # both are ranks of one, over NCCL or gloo
    peer_access: bool = True  # of their GPUs, where these are two of one machine
    connection: bool = True  # a pipe, or a socket of this machine


def choose_transport(sender: Endpoint, receiver: Endpoint, link: Link) -> Transport:
    """The fastest way from one to the other. Says in the log which, and why."""
    transport, reason = _choose(sender, receiver, link)
    logger.info("Weights go to the rollout by %s: %s.", transport, reason)
    return transport


def gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def device_of(uuid: str) -> torch.device:
    """This process's name for a GPU. Raises RolloutError where it does not see it."""
    seen = [gpu_uuid(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise RolloutError(
            f"The weights lie on the GPU {uuid}, and this process sees "
            f"{', '.join(seen) or 'none'}. Add it to CUDA_VISIBLE_DEVICES (in any order), or send "
            "through host memory."
        )
    return torch.device("cuda", seen.index(uuid))


def _choose(sender: Endpoint, receiver: Endpoint, link: Link) -> tuple[Transport, str]:
    if sender.machine != receiver.machine:
        if link.process_group:
            return "broadcast", "they are on two machines, and ranks of one process group"
        return "disk", "they are on two machines, and share no process group"
    if sender.process == receiver.process:
        return "direct", "both are in one process"
    if sender.gpu is not None and sender.gpu == receiver.gpu:
        if link.connection:
            # of which NCCL refuses to serve two ranks
            return "ipc", f"two processes on one GPU, {sender.gpu}"
        return "disk", "two processes on one GPU, without a connection"
    on_two_gpus = sender.gpu is not None and receiver.gpu is not None
    if link.process_group and on_two_gpus and link.peer_access:
        return "broadcast", "two GPUs of one machine that reach each other"
    if link.connection:
        if not on_two_gpus:
            return "host", "two processes of one machine, not both on a GPU"
        lack = "a process group" if link.peer_access else "peer access"
        return "host", f"two GPUs of one machine without {lack}"
    if link.process_group:
        return "broadcast", "two processes of one machine without a connection"
    return "disk", "two processes of one machine without a connection or a process group"


def _machine() -> str:
    """Differs between machines, also where containers have equal names."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"
