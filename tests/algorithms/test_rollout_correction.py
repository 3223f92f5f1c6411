"""Importance correction, PF-PPO's choice of samples, and the entropy controller."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.tensors import random_columns, random_mask, seeds, shapes
from verl.algorithms.entropy import AdaptiveEntropyController
from verl.algorithms.pf_ppo import pf_ppo_rows, pf_ppo_weights
from verl.algorithms.policy_losses import PolicyLossInputs
from verl.algorithms.rollout_correction import (
    correct_rollout,
    loglinear_proximal,
    reinforce_of_rollout,
)
from verl.utils.errors import ConfigError

few = settings(max_examples=15)
levels = st.sampled_from(["token", "sequence"])


def slow_ratio(old, drawn, own, level, t):
    logs = [o - d for o, d, is_own in zip(old, drawn, own) if is_own]
    if level == "token":
        return math.exp(old[t] - drawn[t])
    return math.exp(sum(logs) / (len(logs) if level == "geometric" else 1))


@few
@given(
    seeds, shapes, levels, st.sampled_from([None, "token", "sequence", "geometric"]), st.booleans()
)
def test_weights_and_rejections_token_by_token(seed, shape, level, reject_by, icepop):
    mask, (drawn, noise) = random_mask(seed, *shape), random_columns(seed, *shape, 2)
    drawn, old = -drawn.abs(), -drawn.abs() + 0.5 * noise
    band = (0.6, 1.5) if icepop else (0.0, 1.5)
    dirty = torch.where(mask.bool(), drawn, float("nan"))
    got = correct_rollout(
        old,
        dirty,
        mask,
        weigh_by=level,
        weight_band=band,
        outside="mask" if icepop else "truncate",
        reject_by=reject_by,
        accept_band=(0.7, 1.4),
        veto_below=0.4,
    )

    kept = []
    weights = []
    for row in range(shape[0]):
        columns = old[row].tolist(), drawn[row].tolist(), mask[row].tolist()
        vetoed = any(m and math.exp(o - d) < 0.4 for o, d, m in zip(*columns))
        for t in range(shape[1]):
            keep = bool(mask[row, t]) and not vetoed
            if keep and reject_by is not None:
                keep = 0.7 <= slow_ratio(*columns, reject_by, t) <= 1.4
            weight = slow_ratio(*columns, level, t) if keep else 0.0
            inside = band[0] <= weight <= band[1]
            kept.append(keep)
            weights.append(weight if inside else 0.0 if icepop or not keep else 1.5)

    assert got.mask.flatten().tolist() == kept
    torch.testing.assert_close(got.weights.flatten(), torch.tensor(weights, dtype=torch.float64))
    count = sum(kept)
    mean = sum(weights) / count if count else 0.0
    assert got.metrics["rollout_corr/weight_mean"] == pytest.approx(mean)
    squares = count * sum(weight**2 for weight in weights)
    assert got.metrics["rollout_corr/ess"] == pytest.approx(
        sum(weights) ** 2 / squares if squares else 0.0
    )

    own = int(mask.sum())
    assert got.metrics["rollout_corr/rejected_tokens"] == pytest.approx(
        (own - count) / own if own else 0.0
    )


def test_metrics_are_divergences():
    """Two tokens of probability 0.5 and 0.25 for the rollout, 0.4 and 0.5 for the trainer, in one
    response each."""
    drawn = torch.tensor([[0.5, 0.5], [0.25, 1.0]]).log()
    old = torch.tensor([[0.4, 0.4], [0.5, 1.0]]).log()
    mask = torch.tensor([[1, 1], [1, 0]])
    metrics = correct_rollout(old, drawn, mask).metrics
    ratios = [0.8, 0.8, 2.0]
    assert metrics["rollout_corr/kl"] == pytest.approx(-sum(map(math.log, ratios)) / 3, rel=1e-5)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(
        sum(r - 1 - math.log(r) for r in ratios) / 3, rel=1e-5
    )

    assert metrics["rollout_corr/chi2_token"] == pytest.approx(
        sum(r * r for r in ratios) / 3 - 1, rel=1e-5
    )
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx((0.64**2 + 4) / 2 - 1, rel=1e-5)
    assert metrics["rollout_corr/ess"] == 1.0, "nothing is weighed"
    assert metrics["rollout_corr/rejected_seqs"] == 0.0


def test_degenerate_batches_are_finite():
    for mask in (torch.zeros(2, 3), torch.ones(0, 3), torch.ones(2, 0)):
        got = correct_rollout(
            mask * 1.0, mask * 0.0, mask, weigh_by="token", reject_by="sequence", veto_below=0.1
        )
        assert got.weights.shape == mask.shape
        assert all(math.isfinite(value) for value in got.metrics.values())
    far = correct_rollout(
        torch.full((1, 2), 1e4), torch.zeros(1, 2), torch.ones(1, 2), weigh_by="sequence"
    )
    assert far.weights.tolist() == [[2.0, 2.0]]
    assert all(math.isfinite(value) for value in far.metrics.values())
    with pytest.raises(ConfigError, match="'word'"):
        correct_rollout(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), weigh_by="word")


def test_pf_ppo_draws_the_extremes():
    scores = torch.tensor([-2.0, 0.0, 1.0, 3.0])
    assert pf_ppo_weights(scores, "pow", 2.0).tolist() == [4.0, 0.0, 1.0, 9.0]
    assert pf_ppo_weights(scores, "max_min").tolist() == [1.0, 0.0, 0.0, 1.0]
    assert pf_ppo_weights(scores, "max_random").tolist() == pytest.approx([0.1, 0.1, 0.1, 0.4])
    assert pf_ppo_weights(torch.zeros(3), "pow").tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ConfigError, match="'best'"):
        pf_ppo_weights(scores, "best")
    many = pf_ppo_weights(scores.repeat(500), "pow")
    rows = pf_ppo_rows(many, seed=3)
    assert rows.tolist() == sorted(rows.tolist())
    assert torch.equal(rows, pf_ppo_rows(many, seed=3))
    assert not torch.equal(rows, pf_ppo_rows(many, seed=4))
    drawn = torch.bincount(rows % 4, minlength=4) / 2000
    torch.testing.assert_close(drawn, torch.tensor([4.0, 0.0, 1.0, 9.0]) / 14, atol=0.04, rtol=0)


def test_the_adaptive_entropy_coefficient_follows_the_paper():
    controller = AdaptiveEntropyController(0.0, target_entropy=0.2, delta=0.01)
    for entropy, coef, value in (
        (0.1, 0.01, 0.01),
        (0.15, 0.02, 0.02),
        (0.3, 0.01, 0.0),
        (0.2, 0.01, 0.01),
        (0.3, 0, 0),
        (0.3, 0, 0),
    ):
        controller.update(entropy)
        assert (controller.coef, controller.value) == (pytest.approx(coef), pytest.approx(value))

    again = AdaptiveEntropyController(0.5, target_entropy=0.2, delta=0.01)
    again.load_state_dict(controller.state_dict())
    assert again.value == controller.value
    with pytest.raises(ConfigError, match="delta above 0"):
        AdaptiveEntropyController(0.0, target_entropy=0.2, delta=0.0)


# ---------------------------------------------------------------- the loss of bypass mode


def reinforce_by_rows(columns, mask, level, band, outside, parts):
    """Return loss, gradient by the (B, R) log-probs, and the weights, over micro-batches of rows."""
    new, drawn, advantages, weights = columns
    leaf = new.clone().requires_grad_()
    total = 0.0
    used = torch.zeros_like(new)

    for rows in parts:
        own = mask[rows].bool()
        inputs = PolicyLossInputs(
            log_probs=leaf[rows][own],
            old_log_probs=drawn[rows][own],
            advantages=advantages[rows][own],
            weights=weights[rows][own],
            sequence=rows[:, None].expand_as(own)[own],
        )
        output = reinforce_of_rollout(inputs, weigh_by=level, weight_band=band, outside=outside)
        output.loss.backward()
        total += output.loss.item()
        if level is not None:
            used[rows[:, None].expand_as(own)[own], own.nonzero()[:, 1]] = output.means[
                "rollout_is_weight"
            ]

    return total, leaf.grad, used


@few
@given(seeds, shapes, st.sampled_from([None, "token", "sequence"]), st.booleans())
def test_reinforce_token_by_token_and_in_any_micro_batches(seed, shape, level, icepop):
    mask = random_mask(seed, *shape)
    new, drift, advantages, weights = random_columns(seed, *shape, 4)
    new = -new.abs()
    weights = 0.1 + weights.abs()
    columns = (new, new - 0.5 * drift, advantages, weights)
    band, outside = ((0.6, 1.5), "mask") if icepop else ((0.0, 1.5), "truncate")

    loss = 0.0
    gradient = torch.zeros(shape, dtype=torch.float64)
    for row in range(shape[0]):
        now = new[row].tolist()
        drawn = columns[1][row].tolist()
        own = mask[row].tolist()
        for t in range(shape[1]):
            if not own[t]:
                continue
            w = 1.0 if level is None else slow_ratio(now, drawn, own, level, t)
            if level is not None and not band[0] <= w <= band[1]:
                w = 0.0 if icepop else band[1]
            scale = -w * advantages[row, t].item() * weights[row, t].item()
            loss += scale * now[t]
            gradient[row, t] = scale

    rows = torch.arange(shape[0])
    for parts in ([rows], list(rows.flip(0).split(1))):
        total, got, _ = reinforce_by_rows(columns, mask, level, band, outside, parts)
        assert total == pytest.approx(loss, rel=1e-9, abs=1e-12)
        torch.testing.assert_close(got, gradient, rtol=1e-9, atol=1e-12)


def test_the_weight_of_a_response_is_the_product_and_has_no_gradient():
    new = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64)
    drawn = torch.tensor([[-1.3, -2.0, -0.7]], dtype=torch.float64)
    ones = torch.ones_like(new)
    columns = (new, drawn, 2 * ones, ones)
    rows = [torch.tensor([0])]
    _, gradient, used = reinforce_by_rows(columns, ones, "sequence", (0.0, 9.0), "truncate", rows)
    product = torch.full_like(new, math.exp(0.5))
    torch.testing.assert_close(used, product)
    torch.testing.assert_close(gradient, -2 * product)


def test_responses_are_rejected_by_their_mean_k3():
    old = torch.tensor([[-1.0, -1.0], [-1.0, -3.0]])
    drawn = torch.full((2, 2), -1.0)
    mask = torch.ones(2, 2)
    divergence = (math.exp(-2) - 1 + 2) / 2  # of the second response: log rho is 0 and -2
    for bound, kept in ((divergence + 1e-4, True), (divergence - 1e-4, False)):
        got = correct_rollout(old, drawn, mask, reject_by="k3", accept_band=(0.0, bound))
        assert got.mask[0].all()
        assert bool(got.mask[1].any()) == kept


def test_normalized_weights_have_a_mean_of_one():
    old, drawn = random_columns(3, 4, 6, 2)
    mask = random_mask(3, 4, 6)
    plain = correct_rollout(old, drawn, mask, weigh_by="token")
    got = correct_rollout(old, drawn, mask, weigh_by="token", normalize=True)
    kept = got.weights[got.mask]
    assert kept.mean().item() == pytest.approx(1, abs=1e-6)
    ratio = kept / plain.weights[plain.mask]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


def test_loglinear_log_probs_go_from_the_rollout_to_the_current_policy():
    current = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    drawn = torch.full((3,), -3.0)
    got = loglinear_proximal(current, drawn, torch.tensor([0, 1, 3]))
    torch.testing.assert_close(got, torch.tensor([-3.0, -2.0, -1.5]))
    assert not got.requires_grad
