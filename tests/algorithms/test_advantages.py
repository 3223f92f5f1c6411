"""GAE against a loop written from the paper, and parts of the estimators of groups."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.tensors import random_columns, random_mask, seeds, shapes
from verl.algorithms.advantages import AdvantageInputs, advantage_estimators, gae, unwhitened_gae
from verl.algorithms.group_advantages import group_ids, grpo_advantages
from verl.algorithms.masked import masked_mean, masked_var
from verl.utils.errors import ConfigError

settings.register_profile("algorithms", max_examples=50)
settings.load_profile("algorithms")
discounts = st.sampled_from([0.0, 0.5, 0.95, 1.0])


def slow_gae(rewards, values, mask, gamma, lam):
    """Eq. (16) as a sum over the future of the row's own tokens; tool tokens are taken out
    first."""
    advantages = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        own = [t for t in range(rewards.shape[1]) if mask[row, t]]
        ends = [*own[1:], rewards.shape[1]]
        reward = [float(rewards[row, t:end].sum()) for t, end in zip(own, ends)]
        value = [float(values[row, t]) for t in own] + [0.0]
        delta = [reward[i] + gamma * value[i + 1] - value[i] for i in range(len(own))]
        for i, t in enumerate(own):
            advantages[row, t] = sum(
                (gamma * lam) ** (j - i) * delta[j] for j in range(i, len(own))
            )
    return advantages


@given(seeds, shapes, discounts, discounts)
def test_gae_is_the_papers_sum(seed, shape, gamma, lam):
    mask, (rewards, values) = random_mask(seed, *shape), random_columns(seed, *shape, 2)
    expected = slow_gae(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(unwhitened_gae(rewards, values, mask, gamma, lam), expected)
    advantages, returns = gae(AdvantageInputs(rewards, mask, values=values, gamma=gamma, lam=lam))
    torch.testing.assert_close(returns, (expected + values) * mask)
    mean = masked_mean(expected, mask)
    var = masked_var(expected, mask)
    torch.testing.assert_close(advantages, (expected - mean) / torch.sqrt(var + 1e-8) * mask)


def test_gae_of_undiscounted_outcome_is_reward_minus_value():
    mask = torch.tensor([[1, 1, 0, 0, 1, 0]])
    rewards = torch.tensor([[0.0, 0, 0, 0, 1, 0]])
    values = torch.tensor([[0.2, 0.3, 9, 9, 0.7, 9]])
    expected = torch.tensor([[0.8, 0.7, 0, 0, 0.3, 0]])
    torch.testing.assert_close(unwhitened_gae(rewards, values, mask, 1.0, 1.0), expected)
    # One step of decay from the second to the third own token, not three.
    decayed = unwhitened_gae(rewards, torch.zeros(1, 6), mask, 1.0, 0.5)
    torch.testing.assert_close(decayed, torch.tensor([[0.25, 0.5, 0, 0, 1, 0]]))


def test_gae_without_a_critic_is_an_error():
    with pytest.raises(ConfigError, match="critic"):
        gae(AdvantageInputs(torch.ones(1, 1), torch.ones(1, 1)))


@given(st.floats(-5, 5, width=32), st.integers(2, 17))
def test_equal_rewards_give_no_advantage_in_fp32(reward, size):
    scores = torch.full((size,), reward, dtype=torch.float32)
    assert grpo_advantages(scores, torch.zeros(size, dtype=torch.int64)).abs().max() < 1e-6


def test_group_ids_number_any_identifiers():
    assert group_ids(["b", "a", "b"]).tolist() == [0, 1, 0]
    assert group_ids([]).tolist() == []


def test_a_users_estimator_reads_its_own_columns():
    @advantage_estimators.register("test_baseline")
    def baseline(inputs):
        scores = inputs.token_level_rewards.sum(-1) - inputs.columns["baseline"]
        return scores[:, None] * inputs.response_mask, scores[:, None] * inputs.response_mask

    inputs = AdvantageInputs(
        torch.ones(2, 3), torch.ones(2, 3), columns={"baseline": torch.tensor([1.0, 2.0])}
    )
    assert advantage_estimators.get("test_baseline")(inputs)[0][:, 0].tolist() == [2.0, 1.0]
