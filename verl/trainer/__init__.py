"""Entry points and the trainer; public names load on first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.trainer.api import RLTrainer as RLTrainer
    from verl.trainer.ppo_trainer import PPOTrainer as PPOTrainer
    from verl.trainer.ppo_trainer import RayPPOTrainer as RayPPOTrainer

_PUBLIC = {
    "PPOTrainer": "verl.trainer.ppo_trainer",
    "RLTrainer": "verl.trainer.api",
    "RayPPOTrainer": "verl.trainer.ppo_trainer",
}

__all__ = ["PPOTrainer", "RLTrainer", "RayPPOTrainer"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'verl.trainer' has no attribute '{name}'")
