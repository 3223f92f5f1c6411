"""Sharding (FSDP2) of one role."""

from dataclasses import dataclass, field

from verl.config.setting import setting

_OFFLOAD = "needs weights and moments moved to the host between phases, which the engine does not do yet"


@dataclass(kw_only=True, slots=True)
class WrapPolicyConfig:
    min_num_params: int = setting(0, "size rule of FSDP1", no_effect="every decoder layer is its own FSDP2 unit")


@dataclass(kw_only=True, slots=True)
class FSDPConfig:
    wrap_policy: WrapPolicyConfig = field(default_factory=WrapPolicyConfig)
    param_offload: bool = setting(False, "keep parameters on the host between phases", planned=_OFFLOAD)
    optimizer_offload: bool = setting(False, "keep optimizer moments on the host between phases", planned=_OFFLOAD)
    offload_policy: bool = setting(False, "FSDP2's own CPU offload", planned=_OFFLOAD)
    reshard_after_forward: bool = setting(True, "free gathered parameters after the forward pass")
    fsdp_size: int = setting(-1, "ranks of one sharding group; -1: all", planned="needs several ranks", also=(1,))
    forward_prefetch: bool = setting(False, "gather the next layer early", no_effect="FSDP2 prefetches by itself")
