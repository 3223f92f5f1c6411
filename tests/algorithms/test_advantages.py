"""GAE and GRPO against loops written from the papers."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.tensors import random_columns, random_mask, seeds, shapes, widen
from verl.algorithms.advantages import AdvantageInputs, advantage_estimators, gae, unwhitened_gae
from verl.algorithms.group_advantages import group_ids, grpo, grpo_advantages
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


@given(
    seeds,
    shapes,
    st.lists(st.integers(1, 3), min_size=9, max_size=9),
    st.randoms(use_true_random=False),
)
def test_gae_does_not_see_padding_tool_tokens_or_the_order_of_rows(seed, shape, gaps, rng):
    mask, (rewards, values) = random_mask(seed, *shape), random_columns(seed, *shape, 2)
    inputs = AdvantageInputs(rewards, mask, values=values, gamma=0.9, lam=0.8)
    places = torch.tensor(gaps[: shape[1]]).cumsum(0) - 1
    order = list(range(shape[0]))
    rng.shuffle(order)
    wide = inputs._replace(
        token_level_rewards=widen(rewards, places, 0.0)[order],
        response_mask=widen(mask, places, 0)[order],
        values=widen(values, places, float("nan"))[order],
    )
    for one, other in zip(gae(inputs), gae(wide)):
        torch.testing.assert_close(other[:, places], one[order], rtol=1e-9, atol=1e-9)
        assert other.isfinite().all()


def test_gae_of_undiscounted_outcome_is_reward_minus_value():
    mask = torch.tensor([[1, 1, 0, 0, 1, 0]])
    rewards = torch.tensor([[0.0, 0, 0, 0, 1, 0]])
    values = torch.tensor([[0.2, 0.3, 9, 9, 0.7, 9]])
    expected = torch.tensor([[0.8, 0.7, 0, 0, 0.3, 0]])
    torch.testing.assert_close(unwhitened_gae(rewards, values, mask, 1.0, 1.0), expected)
    # One step of decay from the second to the third own token, not three.
    decayed = unwhitened_gae(rewards, torch.zeros(1, 6), mask, 1.0, 0.5)
    torch.testing.assert_close(decayed, torch.tensor([[0.25, 0.5, 0, 0, 1, 0]]))


def test_gae_degenerate_batches_are_finite():
    for mask in (
        torch.zeros(2, 3),
        torch.tensor([[0.0, 1, 0], [0, 0, 0]]),
        torch.ones(0, 3),
        torch.ones(2, 0),
    ):
        advantages, returns = gae(AdvantageInputs(mask.clone(), mask, values=mask * 0.5))
        assert advantages.shape == mask.shape == returns.shape
        assert advantages.isfinite().all()
        assert returns.isfinite().all()


def test_estimators_say_what_they_miss():
    with pytest.raises(ConfigError, match="critic"):
        gae(AdvantageInputs(torch.ones(1, 1), torch.ones(1, 1)))
    with pytest.raises(ConfigError, match="group number"):
        grpo(AdvantageInputs(torch.ones(1, 1), torch.ones(1, 1)))
    assert {"gae", "grpo"} <= set(advantage_estimators)


def slow_grpo(scores, group, norm_by_std):
    """Section 4.1.2: normalise within the outputs of one question."""
    advantages = []
    for score, own in zip(scores, group):
        members = [s for s, g in zip(scores, group) if g == own]
        mean = statistics.fmean(members) if len(members) > 1 else 0.0
        std = statistics.stdev(members) if len(members) > 1 else 1.0
        advantages.append((score - mean) / (std + 1e-6) if norm_by_std else score - mean)
    return advantages


@given(
    seeds, st.lists(st.integers(-3, 3), min_size=1, max_size=8), st.integers(1, 5), st.booleans()
)
def test_grpo_is_the_papers_formula(seed, group, width, norm_by_std):
    rows = len(group)
    mask, (rewards,) = random_mask(seed, rows, width), random_columns(seed, rows, width, 1)
    expected = torch.tensor(
        slow_grpo(rewards.sum(-1).tolist(), group, norm_by_std), dtype=torch.float64
    )
    inputs = AdvantageInputs(rewards, mask, group=torch.tensor(group), norm_by_std=norm_by_std)
    advantages, returns = grpo(inputs)
    torch.testing.assert_close(advantages, expected[:, None] * mask)

    assert torch.equal(advantages, returns)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    places = torch.arange(width) * 2
    shuffled, _ = grpo(
        inputs._replace(
            token_level_rewards=widen(rewards, places, 0.0)[order],
            response_mask=widen(mask, places, 0)[order],
            group=torch.tensor(group)[order],
        )
    )

    torch.testing.assert_close(shuffled[:, places], advantages[order])


@given(st.floats(-5, 5, width=32), st.integers(2, 17))
def test_equal_rewards_give_no_advantage_in_fp32(reward, size):
    scores = torch.full((size,), reward, dtype=torch.float32)
    assert grpo_advantages(scores, torch.zeros(size, dtype=torch.int64)).abs().max() < 1e-6


def test_a_group_of_one_keeps_its_reward():
    scores = torch.tensor([2.0, 1.0, 3.0])
    advantages = grpo_advantages(scores, torch.tensor([7, 8, 8]))
    assert advantages[0].item() == pytest.approx(2.0, rel=1e-5)
    assert advantages[1:].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-5)


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
