"""The result of a memory plan: the bytes of every phase of a run, and whether they fit."""

from dataclasses import dataclass

from verl.diagnostics.batch import BatchPlan
from verl.diagnostics.hosts import Placement
from verl.diagnostics.picture_memory import PictureMemory
from verl.diagnostics.roles import Parts, Passes, Role
from verl.diagnostics.rollout_memory import RolloutPlan
from verl.utils.units import GIB


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """The worst moment of one phase."""

    role: str
    phase: str
    device: Parts  # of all roles on the devices of `role`
    host: int  # bytes of the fullest host, without those that every process needs anyway
    passes: Passes | None = None

    @property
    def name(self) -> str:
        """Return the name in texts, and in measurements."""
        return f"{self.role}, {self.phase}"

    @property
    def device_bytes(self) -> int:
        """Bytes on one device."""
        return sum(self.device.values())


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """All phases of a run, with the roles and the batch that they were planned for."""

    placement: Placement
    batch: BatchPlan
    roles: dict[str, Role]
    rollout: RolloutPlan | None  # None: fine-tuning
    pictures: PictureMemory
    phases: tuple[PhasePlan, ...]

    @property
    def worst(self) -> PhasePlan:
        """Return the phase that takes most of a device."""
        return max(self.phases, key=lambda phase: phase.device_bytes)

    @property
    def host_bytes(self) -> int:
        """Return the most bytes of a host, without the processes themselves."""
        return max(phase.host for phase in self.phases)

    @property
    def problems(self) -> list[str]:
        """Describe everything that does not fit on a device."""
        usable = self.placement.usable_bytes
        found = []
        if self.rollout is not None and self.rollout.at_once < 1:
            found.append("the key-value cache has no room for a single sample of full length")
        for phase in self.phases:
            if usable is not None and phase.device_bytes > usable:
                found.append(
                    f"{phase.name}: {phase.device_bytes / GIB:.1f} GiB of {usable / GIB:.1f} usable"
                )
        return found

    @property
    def fits(self) -> bool | None:
        """Whether every phase fits on a device; None where its size is not known."""
        if self.problems:
            return False
        return None if self.placement.usable_bytes is None else True
