"""Advantages of turns: unbiased on a chain of decisions that can be enumerated."""

import itertools

import pytest
import torch

from verl.algorithms.advantages import AdvantageInputs, advantage_estimators
from verl.utils.errors import ConfigError

# A chain of two decisions. 0 ends the episode; 1 goes on. Reward by the decisions so far.
REWARDS = {(0,): 0.3, (1,): -0.2, (1, 0): 0.5, (1, 1): 1.0}
EPISODES = [(0,), (1, 0), (1, 1)]


def log_prob(episode: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
    """Log-probs of the decisions, (turns,)."""
    chosen = [logits[turn].log_softmax(-1)[choice] for turn, choice in enumerate(episode)]
    return torch.stack(chosen)


def rewards_of(episode: tuple[int, ...]) -> list[float]:
    return [REWARDS[episode[: turn + 1]] for turn in range(len(episode))]


def advantages_of(name: str, group: tuple[tuple[int, ...], ...]) -> list[list[float]]:
    """Advantage of every turn of the episodes of one prompt. A turn is two tokens and an answer."""
    rows = len(group)
    turns = torch.full((rows, 6), -1, dtype=torch.int32)
    rewards = torch.zeros(rows, 6, dtype=torch.float64)
    for row, episode in enumerate(group):
        for turn, reward in enumerate(rewards_of(episode)):
            turns[row, 3 * turn : 3 * turn + 2] = turn
            rewards[row, 3 * turn + 1] = reward
    inputs = AdvantageInputs(
        token_level_rewards=rewards,
        response_mask=(turns >= 0).long(),
        group=torch.zeros(rows, dtype=torch.int64),
        columns={"turn_of_token": turns},
    )
    advantages, _ = advantage_estimators.get(name)(inputs)
    assert not advantages[turns < 0].any()
    found = []
    for row, episode in enumerate(group):
        found.append([advantages[row, 3 * turn].item() for turn in range(len(episode))])
    return found


def expected_gradient(name: str, logits: torch.Tensor, samples: int) -> torch.Tensor:
    """The estimator's gradient, averaged over every group by its probability."""
    total = torch.zeros_like(logits)
    for group in itertools.product(EPISODES, repeat=samples):
        own = logits.clone().requires_grad_()
        log_probs = [log_prob(episode, own) for episode in group]
        probability = torch.stack([each.sum() for each in log_probs]).sum().exp().item()
        surrogate = own.sum() * 0
        for each, of_turns in zip(log_probs, advantages_of(name, group)):
            surrogate = surrogate + (each * torch.tensor(of_turns, dtype=each.dtype)).sum()
        (gradient,) = torch.autograd.grad(surrogate / samples, own)
        total += probability * gradient
    return total


def true_gradient(logits: torch.Tensor) -> torch.Tensor:
    own = logits.clone().requires_grad_()
    value = own.sum() * 0
    for episode in EPISODES:
        value = value + log_prob(episode, own).sum().exp() * sum(rewards_of(episode))
    return torch.autograd.grad(value, own)[0]


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_the_gradient_is_unbiased(samples: int):
    logits = torch.tensor([[0.4, -0.3], [0.1, 0.9]], dtype=torch.float64)
    expected = expected_gradient("turn_rloo", logits, samples)
    assert torch.allclose(expected, true_gradient(logits), atol=1e-12)


def test_an_estimator_that_divides_by_the_spread_of_its_group_is_not():
    logits = torch.tensor([[0.4, -0.3], [0.1, 0.9]], dtype=torch.float64)
    expected = expected_gradient("grpo", logits, 3)
    assert not torch.allclose(expected, true_gradient(logits), atol=1e-2)


def test_gradient_ascent_finds_the_optimum_of_the_chain():
    logits = torch.zeros(2, 2, dtype=torch.float64)
    for _ in range(60):
        logits += 2.0 * expected_gradient("turn_rloo", logits, 2)
    best = log_prob((1, 1), logits).sum().exp()
    assert best > 0.9, "-0.2 + 1.0 is the largest sum"


def test_a_reward_after_a_turn_belongs_to_it():
    turns = torch.tensor([[0, -1, 1, -1]], dtype=torch.int32)
    inputs = AdvantageInputs(
        token_level_rewards=torch.tensor([[0.0, 2.0, 0.0, 1.0]]),
        response_mask=torch.tensor([[1, 0, 1, 0]]),
        group=torch.zeros(1, dtype=torch.int64),
        gamma=0.5,
        columns={"turn_of_token": turns},
    )
    advantages, _ = advantage_estimators.get("turn_rloo")(inputs)
    assert advantages.tolist() == [[2.5, 0.0, 1.0, 0.0]]


def test_a_rollout_without_turns_is_an_error():
    inputs = AdvantageInputs(
        token_level_rewards=torch.zeros(1, 2),
        response_mask=torch.ones(1, 2),
        group=torch.zeros(1, dtype=torch.int64),
    )
    with pytest.raises(ConfigError, match="turn_rloo needs turns of agent loops"):
        advantage_estimators.get("turn_rloo")(inputs)
