"""The root of the configuration tree of `verl.trainer.main_ppo`."""

from dataclasses import dataclass, field

from verl.config.actor_rollout_ref import ActorRolloutRefConfig
from verl.config.algorithm import AlgorithmConfig
from verl.config.async_training import AsyncTrainingConfig
from verl.config.critic import CriticConfig
from verl.config.data import DataConfig
from verl.config.distillation import DistillationConfig
from verl.config.reward import CustomRewardFunctionConfig, RewardModelConfig
from verl.config.trainer import RayInitConfig, TrainerConfig


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    data: DataConfig = field(default_factory=DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = field(default_factory=ActorRolloutRefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    custom_reward_function: CustomRewardFunctionConfig = field(
        default_factory=CustomRewardFunctionConfig
    )
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    async_training: AsyncTrainingConfig = field(default_factory=AsyncTrainingConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)

    @property
    def needs_critic(self) -> bool:
        """Return whether a value model is trained."""
        if self.trainer.val_only:
            return False
        if self.critic.enable is not None:
            return self.critic.enable
        return self.algorithm.adv_estimator == "gae" and not self.distillation.is_whole_loss

    @property
    def needs_reference(self) -> bool:
        """Return whether a frozen copy of the first policy is needed."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def advantages_read_old_log_probs(self) -> bool:
        """Return whether log-probs are read before the update."""
        return (
            self.algorithm.use_kl_in_reward
            or self.distillation.is_reward
            or self.needs_sum_pi_squared
        )

    @property
    def needs_old_log_probs(self) -> bool:
        """Return whether a pass computes the log-probs before the update.

        False where the rollout's log-probs serve, and where the whole batch is one update: the old
        policy is then the current one, and the update computes its log-probs anyway.
        """
        correction = self.algorithm.rollout_correction
        if correction.needs_no_pass:
            return False

        actor = self.actor_rollout_ref.actor
        whole_batch = (None, self.data.train_batch_size)
        one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size in whole_batch
        reads_before = self.advantages_read_old_log_probs or correction.changes_update
        return reads_before or not one_update

    @property
    def needs_sum_pi_squared(self) -> bool:
        """Return whether the advantages read the sum of squared probabilities at each token."""
        return self.algorithm.adv_estimator == "optimal_token_baseline"
