"""The ranks and hosts of a run, and the memory of each device."""

import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from verl.config import TrainConfig
from verl.config.placement import number_of_ranks, ranks_of_roles
from verl.utils.arithmetic import ceil_div
from verl.utils.errors import ConfigError
from verl.utils.registry import nearest_names
from verl.utils.units import GIB

# Memory of a card as torch reports it, in GiB.
CARDS = {
    "B200": 178.4,
    "H200": 139.8,
    "H100": 79.1,
    "H800": 79.1,
    "H20": 95.1,
    "A100": 79.1,
    "A100-40": 39.4,
    "A800": 79.1,
    "L40S": 44.4,
    "L40": 44.4,
    "A40": 44.4,
    "A6000": 47.4,
    "L4": 22.0,
    "V100": 31.7,
    "4090": 23.6,
}
# Memory that no tensor gets: the CUDA context with kernels, cuBLAS's workspaces, NCCL's buffers.
OUTSIDE_BYTES = int(1.0 * GIB)
# Share of the rest that a plan may fill; fragments of the allocator take some of it.
FILLED_SHARE = 0.95


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The ranks of every role on devices and hosts."""

    roles: Mapping[str, tuple[int, ...]]  # the ranks of every role
    ranks: int
    ranks_a_host: int
    device: torch.device  # its kind alone
    device_bytes: int | None  # None: unknown, or a CPU, which uses the host's memory

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def usable_bytes(self) -> float | None:
        """Bytes of a device for tensors; None: unknown."""
        if self.device_bytes is None:
            return None
        return FILLED_SHARE * (self.device_bytes - OUTSIDE_BYTES)

    @property
    def hosts(self) -> int:
        return ceil_div(self.ranks, self.ranks_a_host)

    def colocated(self, role: str) -> list[str]:
        """Return the roles on the devices of `role`, with itself: two share all ranks or none."""
        return [name for name, ranks in self.roles.items() if ranks == self.roles[role]]

    def fullest_host(self, held: Mapping[str, int]) -> int:
        """Return the bytes of the fullest host, if every process of a role holds `held[role]`."""
        totals = Counter[int]()
        for role, num_bytes in held.items():
            for rank in self.roles[role]:
                totals[rank // self.ranks_a_host] += num_bytes
        return max(totals.values())

    @classmethod
    def of(cls, config: TrainConfig, device_gib: float | str | None) -> "Placement":
        """Place a configuration on devices.

        Args:
            config: the run.
            device_gib: a size, the name of a card, or None for the visible device.
        """
        trainer = config.trainer
        ranks = number_of_ranks(config)
        ranks_a_host = trainer.n_gpus_per_node or int(
            os.environ.get("LOCAL_WORLD_SIZE", str(ranks))
        )
        visible = torch.cuda.is_available() and trainer.device != "cpu"
        on_cuda = trainer.device != "cpu" and (
            visible or device_gib is not None or trainer.device == "cuda"
        )

        num_bytes = None
        if on_cuda and device_gib is not None:
            num_bytes = int(_gib_of(device_gib) * GIB)
        elif visible:
            num_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

        return cls(
            roles={role: tuple(numbers) for role, numbers in ranks_of_roles(config).items()},
            ranks=ranks,
            ranks_a_host=ranks_a_host,
            device=torch.device("cuda" if on_cuda else "cpu"),
            device_bytes=num_bytes,
        )


def _gib_of(device: float | str) -> float:
    if isinstance(device, str) and device.upper() in CARDS:
        return CARDS[device.upper()]
    try:
        size = float(device)
    except ValueError:
        near = nearest_names(str(device), list(CARDS))
        raise ConfigError(
            f"device_gib must be a number of GiB or the name of a card, got '{device}'. Nearest "
            f"known: {near}. All: {', '.join(CARDS)}."
        ) from None
    if not 0 < size < math.inf:
        raise ConfigError(f"device_gib must be a size above 0, in GiB, got {device}.")
    return size
