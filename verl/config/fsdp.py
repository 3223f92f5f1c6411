"""Sharding (FSDP2) of one role."""

from dataclasses import dataclass, field

from verl.config.choices import DTYPES
from verl.config.setting import setting


@dataclass(kw_only=True, slots=True)
class WrapPolicyConfig:
    min_num_params: int = setting(
        0, "size rule of FSDP1", no_effect="every decoder layer is its own FSDP2 unit"
    )


@dataclass(kw_only=True, slots=True)
class FSDPConfig:
    wrap_policy: WrapPolicyConfig = field(default_factory=WrapPolicyConfig)
    param_offload: bool = setting(
        False, "keep parameters on the host between phases; a CPU run has them there"
    )
    optimizer_offload: bool = setting(False, "keep optimizer moments on the host between phases")
    offload_policy: bool = setting(
        False,
        (
            "FSDP2's own CPU offload: parameters and moments live on the host, and the optimizer "
            "steps there"
        ),
    )
    reshard_after_forward: bool | None = setting(
        None,
        (
            "free gathered parameters after the forward pass; null: unless one rank has room for "
            "them"
        ),
    )
    compute_dtype: str | None = setting(
        None,
        (
            "dtype of forward and backward passes, whatever that of the parameters; null: bfloat16 "
            "on CUDA, else theirs"
        ),
        choices=DTYPES,
    )
    fsdp_size: int = setting(
        -1, "ranks that hold one copy of the weights (HSDP where fewer than all); -1: all"
    )
    forward_prefetch: bool = setting(
        False, "gather the next layer early", no_effect="FSDP2 prefetches by itself"
    )
