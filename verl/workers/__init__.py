"""SPMD roles: thin, each a model, an engine and the calls a driver makes on it."""

from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker
from verl.workers.reference import ReferenceWorker
from verl.workers.reward_model import RewardModelWorker
from verl.workers.rollout import RolloutWorker
from verl.workers.teacher import TeacherWorker
from verl.workers.trained import EngineWorker, TrainedWorker

__all__ = [
    "ActorWorker",
    "CriticWorker",
    "EngineWorker",
    "ReferenceWorker",
    "RewardModelWorker",
    "RolloutWorker",
    "TeacherWorker",
    "TrainedWorker",
]
