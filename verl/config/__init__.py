"""The typed configuration. Importing it needs neither torch nor Hydra; `load_config` brings Hydra
on first use."""

from typing import TYPE_CHECKING

from verl.config.actor import ActorConfig, ExtraLossConfig, PolicyLossConfig
from verl.config.actor_rollout_ref import ActorRolloutRefConfig
from verl.config.algorithm import AlgorithmConfig, KLControlConfig, PFPPOConfig
from verl.config.checkpoint import CheckpointConfig
from verl.config.critic import CriticClassConfig, CriticConfig, CriticModelConfig
from verl.config.data import CustomClassConfig, DataConfig, DataGenConfig, SamplerConfig
from verl.config.distillation import DistillationConfig, TeacherModelConfig
from verl.config.fsdp import FSDPConfig, WrapPolicyConfig
from verl.config.micro_batch import (
    MicroBatch,
    log_prob_micro_batch,
    reward_micro_batch,
    update_micro_batch,
    value_micro_batch,
)
from verl.config.model import FusedKernelConfig, ModelConfig
from verl.config.multi_turn import (
    AgentConfig,
    CustomAsyncServerConfig,
    EnvironmentConfig,
    MultiTurnConfig,
)
from verl.config.optim import OptimConfig
from verl.config.profiler import ProfilerConfig
from verl.config.ref import RefConfig
from verl.config.reward import (
    CustomRewardFunctionConfig,
    RewardModelConfig,
    RewardModelModelConfig,
    SandboxFusionConfig,
)
from verl.config.rollout import EngineKwargsConfig, RolloutConfig, SamplingValConfig, TraceConfig
from verl.config.train import TrainConfig
from verl.config.trainer import PlacementConfig, RayInitConfig, RecordConfig, TrainerConfig
from verl.config.validate import validate
from verl.utils.lazy import lazy_names

if TYPE_CHECKING:
    from verl.config.load import config_from_dict, config_to_dict, load_config

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "CriticClassConfig",
    "CriticConfig",
    "CriticModelConfig",
    "CustomAsyncServerConfig",
    "CustomClassConfig",
    "CustomRewardFunctionConfig",
    "DataConfig",
    "DataGenConfig",
    "DistillationConfig",
    "EngineKwargsConfig",
    "EnvironmentConfig",
    "ExtraLossConfig",
    "FSDPConfig",
    "FusedKernelConfig",
    "KLControlConfig",
    "MicroBatch",
    "ModelConfig",
    "MultiTurnConfig",
    "OptimConfig",
    "PFPPOConfig",
    "PlacementConfig",
    "PolicyLossConfig",
    "ProfilerConfig",
    "RayInitConfig",
    "RecordConfig",
    "RefConfig",
    "RewardModelConfig",
    "RewardModelModelConfig",
    "RolloutConfig",
    "SamplerConfig",
    "SamplingValConfig",
    "SandboxFusionConfig",
    "TeacherModelConfig",
    "TraceConfig",
    "TrainConfig",
    "TrainerConfig",
    "WrapPolicyConfig",
    "config_from_dict",
    "config_to_dict",
    "load_config",
    "log_prob_micro_batch",
    "reward_micro_batch",
    "update_micro_batch",
    "validate",
    "value_micro_batch",
]


__getattr__ = lazy_names(
    __name__,
    dict.fromkeys(("config_from_dict", "config_to_dict", "load_config"), "verl.config.load"),
)
