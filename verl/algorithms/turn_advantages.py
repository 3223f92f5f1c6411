"""Advantages of single turns, from rewards that belong to turns."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl.algorithms.advantages import (
    AdvantageInputs,
    Advantages,
    advantage_estimators,
    formula,
)
from verl.algorithms.group_advantages import group_sum
from verl.utils.errors import ConfigError
from verl.utils.phases import phase


@advantage_estimators.register("turn_rloo")
@formula(
    "rewards from turn k on - mean of the same of the group's other samples that have a turn k"
)
@phase(reads="token_level_rewards response_mask uid turn_of_token")
def turn_rloo(inputs: AdvantageInputs) -> Advantages:
    """Leave-one-out advantages of every turn: RLOO (arXiv:2402.14740) on rewards to go.

        G_{i,k} = sum over j >= k of gamma^(j - k) r_{i,j}
        A_{i,k} = G_{i,k} - mean of G_{l,k} over the other samples l of the prompt with a turn k

    r_{i,j} is the sum of the token rewards of turn j. The baseline depends on other samples alone,
    so the policy gradient is unbiased (Williams 1992): a turn answers for the rewards after it, and
    nothing is divided by a spread that its own rewards take part in. Where no other sample has a
    turn k the baseline is 0.
    """
    if inputs.group is None:
        raise ConfigError(
            "adv_estimator=turn_rloo needs a group, got none: the prompt that each row answers."
        )
    turns = inputs.columns.get("turn_of_token")
    if turns is None:
        raise ConfigError(
            "adv_estimator=turn_rloo needs turns of agent loops, got a rollout without them. Set "
            "actor_rollout_ref.rollout.mode=async, or use adv_estimator=rloo."
        )
    mask = inputs.response_mask.bool()
    rewards = turn_sums(inputs.token_level_rewards, turns)
    exists = turn_sums(mask.to(rewards.dtype), turns) > 0
    to_go = rewards_to_go(rewards, inputs.gamma)
    per_turn = to_go - mean_of_others(to_go, exists, inputs.group)

    slot = turns.long().clamp(min=0)
    advantages = torch.where(mask, per_turn.gather(-1, slot), 0.0)
    return advantages, advantages.clone()


def turn_sums(values: Float[Tensor, "B R"], turns: Int[Tensor, "B R"]) -> Float[Tensor, "B K"]:
    """Sum the values of each turn's tokens. Others (-1) count for the turn before them."""
    if turns.numel() == 0:
        return values.new_zeros(len(values), 1)
    own = torch.cummax(turns.long(), dim=-1).values
    width = max(int(turns.max()) + 1, 1)
    sums = values.new_zeros(len(values), width)
    counted = torch.where(own >= 0, values, 0.0)
    return sums.scatter_add(-1, own.clamp(min=0), counted)


def rewards_to_go(rewards: Float[Tensor, "B K"], gamma: float) -> Float[Tensor, "B K"]:
    """Sum each turn's reward and the discounted ones after it."""
    to_go = rewards.clone()
    for turn in reversed(range(rewards.shape[1] - 1)):
        to_go[:, turn] += gamma * to_go[:, turn + 1]
    return to_go


def mean_of_others(
    values: Float[Tensor, "B K"], exists: Tensor, group: Int[Tensor, " B"]
) -> Float[Tensor, "B K"]:
    """Average each turn over the other samples of the group that have it; 0 where none has."""
    counted = torch.where(exists, values, 0.0).double()
    has_turn = exists.double()
    others = group_sum(has_turn, group) - has_turn
    mean = (group_sum(counted, group) - counted) / others.clamp(min=1)
    return torch.where(others > 0, mean, 0.0).to(values.dtype)
