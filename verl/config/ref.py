"""The frozen reference policy."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.actor import ActorConfig
from verl.config.choices import STRATEGIES
from verl.config.fsdp import FSDPConfig
from verl.config.setting import alias, as_in, setting


@dataclass(kw_only=True, slots=True)
class FrozenPassConfig:
    """The passes of a frozen model, which compute log-probs."""

    use_torch_compile: bool | None = setting(
        None,
        "compile the decoder layers; null: as the actor",
        follows="actor_rollout_ref.actor.use_torch_compile",
    )
    log_prob_micro_batch_size_per_gpu: int | None = setting(
        None,
        "responses a forward pass; null: as many as fit log_prob_max_token_len_per_gpu",
        above=0,
    )
    log_prob_use_dynamic_bsz: bool | None = setting(
        None,
        "micro-batches by tokens; null: unless their rows are given",
        follows="actor_rollout_ref.actor.use_dynamic_bsz",
    )
    log_prob_max_token_len_per_gpu: int | None = setting(
        None,
        "tokens a forward pass; null: as many as fit the GPU",
        above=0,
        follows="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    )
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    ulysses_sequence_parallel_size: int = setting(
        1,
        "ranks that share the tokens of a sequence",
        above=0,
        follows="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    )


@dataclass(kw_only=True, slots=True)
class RefConfig(FrozenPassConfig):
    strategy: str = setting(
        "fsdp",
        "how weights are sharded",
        choices=STRATEGIES,
        follows="actor_rollout_ref.actor.strategy",
    )
    log_prob_micro_batch_size: Any = alias(
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
    )
    entropy_from_logits_with_chunking: bool = as_in(
        ActorConfig, "entropy_from_logits_with_chunking"
    )
    entropy_checkpointing: bool = as_in(ActorConfig, "entropy_checkpointing")
