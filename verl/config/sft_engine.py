"""Names of verl's later fine-tuning (its `sft_trainer_engine`): sections `engine` and `checkpoint`,
whose keys are other names of keys that this configuration has."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.fsdp import WrapPolicyConfig
from verl.config.keys import Values
from verl.config.setting import alias, setting

_LATER = "later name in verl"
_NO_ENTROPY = "fine-tuning computes no entropy"


@dataclass(kw_only=True, slots=True)
class SFTEngineConfig:
    strategy: Any = alias("model.strategy", _LATER)
    param_offload: Any = alias("model.fsdp_config.param_offload", _LATER)
    optimizer_offload: Any = alias("model.fsdp_config.optimizer_offload", _LATER)
    offload_policy: Any = alias("model.fsdp_config.offload_policy", _LATER)
    reshard_after_forward: Any = alias("model.fsdp_config.reshard_after_forward", _LATER)
    fsdp_size: Any = alias("model.fsdp_config.fsdp_size", _LATER)
    forward_prefetch: Any = alias("model.fsdp_config.forward_prefetch", _LATER)
    wrap_policy: WrapPolicyConfig = field(default_factory=WrapPolicyConfig)
    dtype: Any = alias("model.fsdp_config.compute_dtype", _LATER)
    model_dtype: Any = alias("model.fsdp_config.model_dtype", _LATER)
    ulysses_sequence_parallel_size: Any = alias("ulysses_sequence_parallel_size", _LATER)
    use_torch_compile: Any = alias("model.use_torch_compile", _LATER)
    use_orig_params: bool = setting(
        False, "option of FSDP1", no_effect="FSDP2 always keeps them", also=(True,)
    )
    forward_only: bool = setting(
        False, "compute no gradients", planned="fine-tuning updates its model"
    )
    seed: int | None = setting(None, "seed", no_effect="trainer.seed is the seed of everything")
    full_determinism: bool = setting(
        False, "deterministic kernels", no_effect="PyTorch chooses the kernels of updates"
    )
    entropy_from_logits_with_chunking: bool = setting(False, "entropy", no_effect=_NO_ENTROPY)
    entropy_checkpointing: bool = setting(False, "entropy", no_effect=_NO_ENTROPY)


@dataclass(kw_only=True, slots=True)
class SFTCheckpointConfig:
    save_contents: Any = alias("trainer.checkpoint.save_contents", _LATER)
    load_contents: Any = alias("trainer.checkpoint.load_contents", _LATER)


def with_conversations(given: Values) -> Values:
    """Return `given` with conversations turned on where their column alone is named.

    Later versions of verl have no other rows, and no key that turns them on.
    """
    names_messages = "data.multiturn.messages_key" in given
    others = ("data.multiturn.enable", "data.prompt_key", "data.response_key")
    if names_messages and not any(key in given for key in others):
        return {**given, "data.multiturn.enable": True}
    return dict(given)
