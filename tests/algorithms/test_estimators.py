"""Every registered estimator: the paper's numbers, and none of its answers depends on padding,
order or gaps.

The properties run over the registry, so that a new estimator is tested by being registered.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.references import ADVANTAGES, rewards_to_go, whitened
from tests.algorithms.tensors import random_columns, random_mask, seeds, widen
from verl.algorithms.advantages import AdvantageInputs, advantage_estimators
from verl.utils.errors import ConfigError

few = settings(max_examples=15)
NAMES = sorted(name for name in advantage_estimators if not name.startswith("test_"))
groupings = st.lists(st.integers(-2, 2), min_size=1, max_size=8)


def inputs_of(seed: int, groups: list[int], width: int, *, coarse: bool = False) -> AdvantageInputs:
    """A batch with everything that an estimator may read; `coarse` rewards are often equal."""
    rows = len(groups)
    mask, (rewards, values) = random_mask(seed, rows, width), random_columns(seed, rows, width, 2)
    generator = torch.Generator().manual_seed(seed)

    if coarse:
        rewards = torch.zeros_like(rewards)
        rewards[:, -1] = torch.randint(0, 2, (rows,), generator=generator).double()

    return AdvantageInputs(
        rewards,
        mask,
        group=torch.tensor(groups),
        values=values,
        gamma=0.9,
        lam=0.8,
        columns={
            "reward_baselines": torch.randn(rows, generator=generator, dtype=torch.float64),
            "old_log_probs": -1 - values.abs(),
            "sum_pi_squared": values.abs().clamp(0.2, 1.0),
            "turn_of_token": torch.where(mask.bool(), torch.arange(width) // 2, -1),
        },
    )


def as_tensor(rows: list[list[float | None]]) -> torch.Tensor:
    return torch.tensor(
        [[0.0 if value is None else value for value in row] for row in rows], dtype=torch.float64
    )


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@few
@given(seeds, groupings, st.integers(1, 5), st.booleans())
def test_a_row_has_the_advantage_of_the_paper(name, seed, groups, width, coarse):
    inputs = inputs_of(seed, groups, width, coarse=coarse)
    scores = inputs.token_level_rewards.sum(-1).tolist()
    lengths = inputs.response_mask.sum(-1).tolist()
    expected = torch.tensor(ADVANTAGES[name](scores, groups, lengths), dtype=torch.float64)
    advantages, returns = advantage_estimators.get(name)(inputs)
    # Rounding of equal rewards over a spread of 1e-6.
    torch.testing.assert_close(
        advantages, expected[:, None] * inputs.response_mask, rtol=1e-7, atol=1e-7
    )
    assert torch.equal(advantages, returns)


@few
@given(seeds, groupings, st.integers(1, 5))
def test_reinforce_plus_plus_whitens_what_is_to_come(seed, groups, width):
    inputs = inputs_of(seed, groups, width)
    own = inputs.response_mask.bool().tolist()
    to_go = [
        rewards_to_go(row, mask, 0.9) for row, mask in zip(inputs.token_level_rewards.tolist(), own)
    ]
    advantages, returns = advantage_estimators.get("reinforce_plus_plus")(inputs)
    torch.testing.assert_close(returns, as_tensor(to_go))
    torch.testing.assert_close(advantages, as_tensor(whitened(to_go)))


@few
@given(seeds, groupings, st.integers(1, 5))
def test_the_groups_mean_is_the_baseline_of_reinforce_plus_plus(seed, groups, width):
    inputs = inputs_of(seed, groups, width)
    scores = inputs.token_level_rewards.sum(-1)
    rows = []
    for row, mask in enumerate(inputs.response_mask.bool().tolist()):
        members = scores[torch.tensor(groups) == groups[row]]
        baseline = members.mean().item() if len(members) > 1 else 0.0
        rows.append([scores[row].item() - baseline if own else None for own in mask])
    advantages, _ = advantage_estimators.get("reinforce_plus_plus_baseline")(inputs)
    torch.testing.assert_close(advantages, as_tensor(whitened(rows)))


@few
@given(seeds, groupings, st.integers(1, 5))
def test_remax_subtracts_the_greedy_score(seed, groups, width):
    inputs = inputs_of(seed, groups, width)
    own = inputs.response_mask.bool().tolist()
    to_go = [
        rewards_to_go(row, mask, 1.0) for row, mask in zip(inputs.token_level_rewards.tolist(), own)
    ]
    baselines = inputs.columns["reward_baselines"].tolist()
    expected = [[None if x is None else x - b for x in row] for row, b in zip(to_go, baselines)]
    torch.testing.assert_close(advantage_estimators.get("remax")(inputs)[0], as_tensor(expected))


def test_gdpo_keeps_kinds_of_reward_apart():
    """Sums of 0/1 rewards collapse (1+0 = 0+1); kinds of unlike spread do not."""
    kinds = torch.tensor([[1.0, 0], [0, 1], [0, 0], [0, 0]], dtype=torch.float64)
    plain = AdvantageInputs(
        kinds.sum(-1, keepdim=True), torch.ones(4, 1), group=torch.zeros(4, dtype=torch.int64)
    )
    weighed = plain._replace(components=kinds, component_weights=torch.tensor([1.0, 3.0]))
    collapsed, apart = (
        advantage_estimators.get("gdpo")(inputs)[0][:, 0] for inputs in (plain, weighed)
    )
    assert collapsed[0] == collapsed[1]
    one, other = ((kinds[:, k] - 0.25) / (kinds[:, k].std() + 1e-6) for k in (0, 1))
    total = one + 3 * other
    torch.testing.assert_close(apart, (total - total.mean()) / (total.std() + 1e-6))


def test_without_the_division_it_is_dr_grpo():
    inputs = inputs_of(3, [0, 0, 0, 1, 1], 4)
    scores = inputs.token_level_rewards.sum(-1)
    for name in ("grpo", "grpo_passk"):
        plain, _ = advantage_estimators.get(name)(inputs._replace(norm_by_std=False))
        divided, _ = advantage_estimators.get(name)(inputs)
        std = torch.stack([scores[:3].std()] * 3 + [scores[3:].std()] * 2) + 1e-6
        torch.testing.assert_close(divided * std[:, None], plain)


@pytest.mark.parametrize("name", NAMES)
@few
@given(
    seeds,
    groupings,
    st.lists(st.integers(1, 3), min_size=5, max_size=5),
    st.randoms(use_true_random=False),
)
def test_padding_gaps_order_and_group_names_change_nothing(name, seed, groups, gaps, rng):
    inputs = inputs_of(seed, groups, 5)
    estimator = advantage_estimators.get(name)
    places = torch.tensor(gaps).cumsum(0) - 1
    order = list(range(len(groups)))
    rng.shuffle(order)
    assert inputs.values is not None
    wide = inputs._replace(
        token_level_rewards=widen(inputs.token_level_rewards, places, 0.0)[order],
        response_mask=widen(inputs.response_mask, places, 0)[order],
        values=widen(inputs.values, places, float("nan"))[order],
        group=7 - torch.tensor(groups)[order],
        columns={
            name: column[order]
            if column.ndim == 1
            else widen(column, places, float("nan") if column.is_floating_point() else -1)[order]
            for name, column in inputs.columns.items()
        },
    )

    for one, other in zip(estimator(inputs), estimator(wide)):
        torch.testing.assert_close(other[:, places], one[order], rtol=1e-8, atol=1e-8)
        unseen = torch.ones(other.shape[1], dtype=torch.bool)
        unseen[places] = False
        assert not other[:, unseen].any()


@pytest.mark.parametrize("name", NAMES)
def test_degenerate_batches_are_finite(name):
    """No row, no column, one sample, equal rewards, nothing of the model's own."""
    estimator = advantage_estimators.get(name)
    for rows, width, fill in ((0, 3, 1), (3, 0, 1), (1, 1, 1), (1, 3, 1), (4, 3, 1), (4, 3, 0)):
        mask = torch.full((rows, width), fill)
        inputs = AdvantageInputs(
            torch.full((rows, width), 0.1),
            mask,
            group=torch.zeros(rows, dtype=torch.int64),
            values=torch.zeros(rows, width),
            columns={
                "reward_baselines": torch.zeros(rows),
                "old_log_probs": torch.zeros(rows, width),
                "sum_pi_squared": torch.ones(rows, width),
                "turn_of_token": torch.full((rows, width), 0 if fill else -1),
            },
        )

        for column in estimator(inputs):
            assert column.shape == mask.shape
            assert column.dtype == torch.float32
            assert column.isfinite().all()
            if name in ADVANTAGES and column.numel() and rows > 1:  # equal rewards teach nothing
                assert column.abs().max() < 1e-6


@pytest.mark.parametrize(
    ("name", "alone"),
    [("grpo", 2.0), ("gpg", 2.0 * 3 / 2), ("rloo", 0.0), ("opo", 0.0), ("grpo_passk", 0.0)],
)
def test_a_group_of_one(name, alone):
    inputs = AdvantageInputs(
        torch.tensor([[2.0], [1.0], [3.0]]), torch.ones(3, 1), group=torch.tensor([7, 8, 8])
    )
    assert advantage_estimators.get(name)(inputs)[0][0].item() == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("gae", "reinforce_plus_plus", "remax")]
)
def test_a_missing_group_is_reported(name):
    with pytest.raises(ConfigError, match=f"{name} needs a group"):
        advantage_estimators.get(name)(AdvantageInputs(torch.ones(1, 1), torch.ones(1, 1)))


def test_a_missing_greedy_score_is_reported():
    with pytest.raises(ConfigError, match="ReMaxTrainer"):
        advantage_estimators.get("remax")(AdvantageInputs(torch.ones(1, 1), torch.ones(1, 1)))


@few
@given(seeds, groupings, st.integers(1, 5))
def test_the_optimal_token_baseline_weighs_by_realized_energy(seed, groups, width):
    """Against sums over tokens and responses, with the gradient's norm taken by autograd."""
    inputs = inputs_of(seed, groups, width)
    rows = len(groups)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width, 5, generator=generator, dtype=torch.float64)
    drawn = torch.randint(0, 5, (rows, width), generator=generator)
    log_probs = logits.log_softmax(-1)
    columns = {
        "old_log_probs": log_probs.gather(-1, drawn[..., None]).squeeze(-1),
        "sum_pi_squared": log_probs.exp().square().sum(-1),
    }
    found, _ = advantage_estimators.get("optimal_token_baseline")(inputs._replace(columns=columns))

    own = inputs.response_mask.bool()
    rewards = inputs.token_level_rewards
    energy = torch.zeros(rows, width).double()
    to_go = torch.zeros(rows, width).double()
    for row in range(rows):
        total = 0.0
        for t in range(width):
            to_go[row, t] = rewards[row, t:].sum()
            if own[row, t]:
                y = logits[row, t].clone().requires_grad_()
                (slope,) = torch.autograd.grad(y.log_softmax(-1)[drawn[row, t]], y)
                total += slope.square().sum().item()
                energy[row, t] = total
    for row in range(rows):
        for t in range(width):
            members = [i for i in range(rows) if groups[i] == groups[row] and own[i, t]]
            if not own[row, t]:
                assert found[row, t] == 0
                continue
            weight = sum(energy[i, t].item() for i in members)
            baseline = sum((energy[i, t] * to_go[i, t]).item() for i in members) / weight
            assert found[row, t].item() == pytest.approx(to_go[row, t].item() - baseline, abs=1e-8)


def test_the_optimal_token_baseline_names_what_it_misses():
    inputs = inputs_of(0, [0, 0], 2)._replace(columns={})
    with pytest.raises(ConfigError, match=r"\['old_log_probs', 'sum_pi_squared'\].*bypass_mode"):
        advantage_estimators.get("optimal_token_baseline")(inputs)
