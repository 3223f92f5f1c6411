"""The three roles of the trained language model."""

from dataclasses import dataclass, field

from verl.config.actor import ActorConfig
from verl.config.model import ModelConfig
from verl.config.profiler import ProfilerConfig
from verl.config.ref import RefConfig
from verl.config.rollout import RolloutConfig
from verl.config.setting import setting


@dataclass(kw_only=True, slots=True)
class ActorRolloutRefConfig:
    hybrid_engine: bool = setting(
        True,
        "actor and rollout share their devices",
        planned=(
            "leave it out; trainer.placement.rollout=[2,3], for example, gives the rollout ranks "
            "of its own"
        ),
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    nccl_timeout: int = setting(
        600, "seconds a collective may take", no_effect="trainer.deadline_s bounds every call"
    )
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
