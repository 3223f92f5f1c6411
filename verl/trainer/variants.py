"""Which trainer a configuration asks for."""

from verl.config import TrainConfig
from verl.trainer.dapo import DAPOTrainer
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.remax import ReMaxTrainer


def trainer_class(config: TrainConfig) -> type[PPOTrainer]:
    """Return the trainer class that the configuration asks for."""
    if config.algorithm.filter_groups.enable:
        return DAPOTrainer
    if config.algorithm.adv_estimator == "remax":
        return ReMaxTrainer
    return PPOTrainer
