"""Entry points and the trainer; public names load on first use."""

from typing import TYPE_CHECKING

from verl.utils.lazy import lazy_names

if TYPE_CHECKING:
    from verl.trainer.api import RLTrainer as RLTrainer
    from verl.trainer.ppo_trainer import PPOTrainer as PPOTrainer
    from verl.trainer.ppo_trainer import RayPPOTrainer as RayPPOTrainer

__all__ = ["PPOTrainer", "RLTrainer", "RayPPOTrainer"]


__getattr__ = lazy_names(
    __name__,
    {
        "PPOTrainer": "verl.trainer.ppo_trainer",
        "RLTrainer": "verl.trainer.api",
        "RayPPOTrainer": "verl.trainer.ppo_trainer",
    },
)
