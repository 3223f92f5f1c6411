"""SPMD roles: thin, each a model, an engine and the calls a driver makes on it."""

from verl.workers.actor import ActorRolloutWorker
from verl.workers.critic import CriticWorker
from verl.workers.reference import ReferenceWorker
from verl.workers.reward_model import RewardModelWorker
from verl.workers.teacher import TeacherWorker

__all__ = [
    "ActorRolloutWorker",
    "CriticWorker",
    "ReferenceWorker",
    "RewardModelWorker",
    "TeacherWorker",
]
