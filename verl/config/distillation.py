"""On-policy distillation: a frozen teacher gives targets for the tokens that the actor drew."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.choices import DISTILLATION_LOSSES, DTYPES, EXACT_DIVERGENCES
from verl.config.model import LoadedModelConfig
from verl.config.ref import FrozenPassConfig
from verl.config.setting import as_in, setting


@dataclass(kw_only=True, slots=True)
class TeacherModelConfig:
    model_path: str | None = setting(
        None,
        "folder or hub name of the teacher, a causal LM with the actor's vocabulary",
        is_path=True,
    )
    trust_remote_code: bool = as_in(LoadedModelConfig, "trust_remote_code")
    override_config: dict[str, Any] = as_in(LoadedModelConfig, "override_config")
    dtype: str | None = setting(
        None,
        "dtype of the parameters; null: bfloat16 on CUDA, float32 on a CPU",
        choices=DTYPES,
    )


@dataclass(kw_only=True, slots=True)
class TeacherModelsConfig:
    teacher_model: TeacherModelConfig = field(default_factory=TeacherModelConfig)


@dataclass(kw_only=True, slots=True)
class DistillationLossConfig:
    loss_mode: str = setting(
        "k3",
        "divergence of the actor from the teacher: over the whole vocabulary (reverse_kl, "
        "forward_kl, jsd), or an estimate of the reverse KL from the drawn token",
        choices=DISTILLATION_LOSSES,
    )
    jsd_beta: float = setting(
        0.5, "jsd: weight of the teacher in the mixture, near 0 forward KL, near 1 reverse", above=0
    )
    use_task_rewards: bool = setting(
        True, "add the divergence to the policy loss; False: it is the whole loss, without a reward"
    )
    distillation_loss_coef: float = setting(
        1.0, "weight of the divergence", at_least=0, finite=True
    )
    use_policy_gradient: bool = setting(
        False,
        "the divergence of a token is subtracted from its advantage, where loss_mode is an "
        "estimate; False: it is differentiated",
    )


@dataclass(kw_only=True, slots=True)
class DistillationConfig(FrozenPassConfig):
    enabled: bool = setting(False, "train towards a teacher model on the actor's own responses")
    teacher_models: TeacherModelsConfig = field(default_factory=TeacherModelsConfig)
    distillation_loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)

    @property
    def is_whole_loss(self) -> bool:
        """Return whether the divergence is the whole loss."""
        return self.enabled and not self.distillation_loss.use_task_rewards

    @property
    def is_reward(self) -> bool:
        """Return whether the divergence is subtracted from the advantages."""
        return self.enabled and self.distillation_loss.use_policy_gradient

    @property
    def is_exact(self) -> bool:
        """Return whether the divergence is over the whole vocabulary."""
        return self.enabled and self.distillation_loss.loss_mode in EXACT_DIVERGENCES
