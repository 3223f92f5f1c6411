"""Which trainer a configuration asks for."""

from verl.config import TrainConfig
from verl.trainer.dapo import DAPOTrainer
from verl.trainer.partners import PartnersTrainer
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.remax import ReMaxTrainer
from verl.trainer.schedules.dynamic_sampling import (
    FullyAsyncDAPOTrainer,
    OneStepOffDAPOTrainer,
)
from verl.trainer.schedules.fully_async import FullyAsyncTrainer
from verl.trainer.schedules.one_step_off import OneStepOffTrainer


def trainer_class(config: TrainConfig) -> type[PPOTrainer]:
    """Return the trainer class that the configuration asks for."""
    filters_groups = config.algorithm.filter_groups.enable
    if config.trainer.mode == "fully_async":
        return FullyAsyncDAPOTrainer if filters_groups else FullyAsyncTrainer
    if config.trainer.mode == "one_step_off":
        return OneStepOffDAPOTrainer if filters_groups else OneStepOffTrainer
    if filters_groups:
        return DAPOTrainer
    if config.algorithm.adv_estimator == "remax":
        return ReMaxTrainer
    if config.actor_rollout_ref.rollout.agent.partners:
        return PartnersTrainer
    return PPOTrainer
