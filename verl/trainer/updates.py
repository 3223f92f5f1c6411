"""Update the critic and the policies by the rows of a batch, dealt to the ranks that learn."""

from typing import Any

from verl.config import TrainConfig
from verl.protocol import DataProto
from verl.single_controller import GroupOf
from verl.single_controller.dealing import Dealt, in_windows, token_counts
from verl.trainer.episodes import mini_batch_rows
from verl.workers import ActorWorker, CriticWorker


def update_critic(
    critic: GroupOf[CriticWorker], batch: DataProto, played: DataProto, config: TrainConfig
) -> dict[str, float]:
    """Update the critic, and return its metrics.

    Args:
        critic: the workers that learn.
        batch: the rows that are learned from.
        played: all trajectories of the step.
        config: of the run.
    """
    samples = config.actor_rollout_ref.rollout.n
    mini_prompts = config.critic.ppo_mini_batch_size
    mini_rows = mini_batch_rows(played, len(batch), mini_prompts, samples, critic)
    return critic.update_critic(dealt_by_prompts(batch, critic, samples), mini_rows)


def update_actor(
    actor: GroupOf[ActorWorker],
    batch: DataProto,
    played: DataProto,
    config: TrainConfig,
    entropy_coeff: float,
) -> dict[str, float]:
    """Update a policy, and return its metrics.

    Args:
        actor: the workers that learn.
        batch: the rows that are learned from.
        played: all trajectories of the step.
        config: of the run.
        entropy_coeff: coefficient of the entropy bonus in this step.
    """
    roles = config.actor_rollout_ref
    samples = roles.rollout.n
    mini_prompts = roles.actor.ppo_mini_batch_size
    mini_rows = mini_batch_rows(played, len(batch), mini_prompts, samples, actor)
    return actor.update_actor(dealt_by_prompts(batch, actor, samples), entropy_coeff, mini_rows)


def dealt_by_prompts(batch: DataProto, group: Any, samples: int) -> Any:
    """Deal all samples of a prompt to one rank, where every rank then has as many rows.

    The rows of a prompt share computation. Mini-batches stay those of one process.
    """
    shares = group.num_shares
    if shares == 1 or len(batch) % (shares * samples):
        return batch
    lengths = token_counts(batch)
    if lengths is None:
        return batch
    return Dealt(batch, in_windows(lengths, shares, unit_rows=samples))
