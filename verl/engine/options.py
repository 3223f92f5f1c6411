"""The options of a training engine, read from the configuration once, for the run and its plan."""

from collections import ChainMap
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from verl.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    DistillationConfig,
    FSDPConfig,
    OptimConfig,
    RefConfig,
    RewardModelConfig,
)
from verl.engine.compile import FAMILIES
from verl.models.load import torch_dtype

RoleSection = ActorConfig | CriticConfig | DistillationConfig | RefConfig | RewardModelConfig


# Options that a role reads only if it learns.
_LEARNING = {"learning": True}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Hold every option of a `TrainEngine`.

    An option has the name of its key in the configuration, so that a key and a field of the same
    name are all that a new one needs. `TrainEngine`, `apply_to_module`, `EngineSetup` and the
    memory plan read options from here alone.

    Attributes:
        device: device of the role; on several GPUs a rank takes its own.
        fsdp_config: sharding, off-load between phases, and the dtype of passes.
        use_torch_compile: compile the decoder layers; None: see `compiles`.
        use_fused_kernels: where layers are compiled, use those kernels that are installed and
            proved (`verl.models.kernels.swiglu`).
        ulysses_sequence_parallel_size: ranks that share the tokens of the same rows.
        share_prompts: compute a prompt once for all its rows of a micro-batch, where that saves
            enough (`MiniBatch`).
        optim: None: the module is only evaluated.
        grad_clip: largest total norm of the gradient; None or 0 clips nothing.
        enable_gradient_checkpointing: recompute activations in the backward pass.
        gradient_checkpointing_share: share of the decoder layers that do so.
        enable_activation_offload: keep on the host the inputs of layers that recompute.
        compile_backend: backend of `torch.compile`; no key.
        shard: whether a single process shards its parameters; None: see `shards_alone`; no key.
    """

    device: torch.device
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    use_torch_compile: bool | None = False
    use_fused_kernels: bool = False
    ulysses_sequence_parallel_size: int = 1
    share_prompts: bool = True

    optim: OptimConfig | None = field(default=None, metadata=_LEARNING)
    grad_clip: float | None = field(default=None, metadata=_LEARNING)
    enable_gradient_checkpointing: bool = field(default=False, metadata=_LEARNING)
    gradient_checkpointing_share: float = field(default=1.0, metadata=_LEARNING)
    enable_activation_offload: bool = field(default=False, metadata=_LEARNING)

    compile_backend: str = "inductor"
    shard: bool | None = None

    @classmethod
    def of(
        cls,
        section: RoleSection,
        device: torch.device,
        *,
        policy: ActorRolloutRefConfig | None = None,
    ) -> "EngineOptions":
        """Read the options of a role.

        An option stands in the first section that has its key: the role's own, its `model`, the
        policy's `model`, the policy's `actor`. One that has no key in any keeps its default. A role
        learns if its own section has `optim`.

        Args:
            section: the role's own section.
            device: device of the role.
            policy: the section that a role shares with the policy; None: it shares none.
        """
        own = _values(section)
        sections = [own]
        if "model" in own:
            sections.append(_values(own["model"]))
        if policy is not None:
            sections += [_values(policy.model), _values(policy.actor)]

        values = ChainMap(*sections)
        learns = "optim" in own
        options = {}
        for option in fields(cls):
            is_read = learns or not option.metadata.get("learning")
            if is_read and option.name in values:
                options[option.name] = values[option.name]
        return cls(device=device, **options)

    @property
    def on_cuda(self) -> bool:
        """Whether the role computes on GPUs."""
        return self.device.type == "cuda"

    @property
    def learns(self) -> bool:
        """Whether the engine has an optimizer."""
        return self.optim is not None

    @property
    def checkpointing_share(self) -> float:
        """Share of the decoder layers that recompute their activations; 0: none."""
        return self.gradient_checkpointing_share if self.enable_gradient_checkpointing else 0.0

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype of forward and backward passes; None: that of the parameters."""
        asked = self.fsdp_config.compute_dtype
        if asked is not None:
            return torch_dtype(asked)
        return torch.bfloat16 if self.on_cuda else None

    def compute_itemsize(self, parameter_itemsize: int) -> int:
        """Return the bytes of an element in forward and backward passes."""
        dtype = self.compute_dtype
        return parameter_itemsize if dtype is None else dtype.itemsize

    def compiles(self, family: str) -> bool:
        """Whether the decoder layers of a family (its `model_type`) are compiled."""
        if self.use_torch_compile is None:
            return self.on_cuda and family in FAMILIES
        return self.use_torch_compile

    def shards_alone(self, parameter_itemsize: int) -> bool:
        """Whether a single process shards its parameters: on CUDA, or to compute in another dtype.

        Several ranks always do.
        """
        if self.shard is not None:
            return self.shard
        return self.on_cuda or self.compute_itemsize(parameter_itemsize) != parameter_itemsize

    def shard_ranks(self, ranks: int, parameter_itemsize: int) -> int | None:
        """Return how many of `ranks` hold one copy of the weights; None: nothing is sharded."""
        if ranks == 1 and not self.shards_alone(parameter_itemsize):
            return None
        size = self.fsdp_config.fsdp_size
        return size if 0 < size < ranks else ranks


def _values(section: Any) -> dict[str, Any]:
    """Return the keys of a section and their values."""
    return {each.name: getattr(section, each.name) for each in fields(section)}
