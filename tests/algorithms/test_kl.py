"""KL estimators against exact distributions, the penalty, the controllers, and the rollout
mismatch."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.tensors import random_columns, random_mask, seeds
from verl.algorithms.entropy import AdaptiveEntropyController, FixedEntropyController
from verl.algorithms.kl import (
    KL_KINDS,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    get_kl_controller,
    kl_penalty,
)
from verl.algorithms.mismatch import mismatch_metrics
from verl.utils.errors import ConfigError

settings.register_profile("algorithms", max_examples=50)
settings.load_profile("algorithms")


def slow_estimate(d, kind):
    kind = kind.removesuffix("+")
    if kind in ("kl", "k1"):
        return d
    if kind == "abs":
        return abs(d)
    if kind in ("mse", "k2"):
        return d * d / 2
    return min(math.exp(-d) - 1 + d, 10.0)


@pytest.mark.parametrize("kind", KL_KINDS[:-1])
@given(d=st.lists(st.floats(-6, 6), min_size=1, max_size=8))
def test_estimators_token_by_token(kind, d):
    reference = torch.linspace(-3, -1, len(d), dtype=torch.float64)
    got = kl_penalty(reference + torch.tensor(d, dtype=torch.float64), reference, kind)
    torch.testing.assert_close(
        got, torch.tensor([slow_estimate(x, kind) for x in d], dtype=torch.float64)
    )


@given(seeds, st.integers(2, 9))
def test_k1_and_k3_are_unbiased_and_their_gradients_are_known(seed, vocabulary):
    (logits, reference) = (0.5 * column[0] for column in random_columns(seed, 1, vocabulary, 2))
    logits.requires_grad_()
    policy = logits.log_softmax(-1)
    reference = reference.log_softmax(-1)
    probabilities = policy.exp().detach()
    exact = (policy.exp() * (policy - reference)).sum()
    (true_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)

    def expectation(kind):
        estimate = (probabilities * kl_penalty(policy, reference, kind)).sum()
        return estimate.detach(), torch.autograd.grad(estimate, logits, retain_graph=True)[0]

    for kind in ("k1", "k3"):
        torch.testing.assert_close(expectation(kind)[0], exact.detach())
    torch.testing.assert_close(expectation("k1")[1], torch.zeros_like(logits), atol=1e-12, rtol=0)
    torch.testing.assert_close(expectation("k2")[1], true_gradient, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kind", [kind for kind in KL_KINDS if kind.endswith("+")])
def test_a_straight_through_form_has_the_gradient_of_k2(kind):
    reference = torch.tensor([-1.0, -2.0, -3.0, -9.0], dtype=torch.float64)
    difference = torch.tensor([0.5, -0.7, 0.0, 6.0], dtype=torch.float64)
    log_probs = (reference + difference).requires_grad_()
    kl_penalty(log_probs, reference, kind).sum().backward()
    torch.testing.assert_close(log_probs.grad, difference)


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_gradients_in_float64(kind):
    reference = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    log_probs = (reference + torch.tensor([0.5, -0.7, 2.0], dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, reference, kind).sum(), log_probs)


def test_k3_is_accurate_near_zero_and_finite_far_away():
    small = torch.tensor([1e-4], dtype=torch.float32)
    assert kl_penalty(small, torch.zeros(1), "k3").item() == pytest.approx(0.5e-8, rel=1e-2)
    far = torch.tensor([-1e4, 1e4]).requires_grad_()
    value = kl_penalty(far, torch.zeros(2), "low_var_kl")
    value.sum().backward()
    assert value.tolist() == [10.0, 10.0]
    assert far.grad.isfinite().all()


def test_full_needs_exact_values():
    tokens = torch.zeros(2, 3)
    with pytest.raises(ConfigError, match=r"'full'.*low_var_kl"):
        kl_penalty(tokens, tokens, "full")
    assert torch.equal(kl_penalty(tokens, tokens, "full", exact=tokens + 1), tokens + 1)
    with pytest.raises(ConfigError, match="'k4'"):
        kl_penalty(tokens, tokens, "k4")


@given(seeds, st.integers(1, 4), st.integers(1, 5))
def test_penalty_in_the_reward_is_of_own_tokens(seed, rows, width):
    mask, (scores, kl) = random_mask(seed, rows, width), random_columns(seed, rows, width, 2)
    kl = torch.where(mask.bool(), kl, float("nan"))
    rewards = apply_kl_penalty(scores, kl, mask, 0.3)
    for i in range(rows):
        for t in range(width):
            expected = scores[i, t] - 0.3 * kl[i, t] if mask[i, t] else scores[i, t]
            assert rewards[i, t].item() == pytest.approx(expected.item())


def test_adaptive_controller_follows_the_paper():
    controller = AdaptiveKLController(0.1, target_kl=2.0, horizon=100)
    value = 0.1
    for current, n, error in ((10.0, 10, 0.2), (2.1, 20, 0.05), (2.0, 50, 0.0), (0.0, 100, -0.2)):
        controller.update(current, n)
        value *= 1 + error * n / 100
        assert controller.value == pytest.approx(value)
    again = AdaptiveKLController(0.1, target_kl=2.0, horizon=100)
    again.load_state_dict(controller.state_dict())
    assert again.value == controller.value


@pytest.mark.parametrize(
    ("adaptive", "fixed", "update"),
    [
        (lambda: AdaptiveKLController(0.3, 2.0, 100), FixedKLController(0.0), (3.0, 10)),
        (
            lambda: AdaptiveEntropyController(0.3, target_entropy=2.0, delta=0.1),
            FixedEntropyController(0.0),
            (1.0,),
        ),
    ],
    ids=["kl", "entropy"],
)
def test_an_adaptive_coefficient_begins_after_a_fixed_one(adaptive, fixed, update):
    """A resumed run has the coefficient of its configuration, and goes on from one that moved."""
    controller = adaptive()
    assert controller.state_dict().keys() <= fixed.state_dict().keys(), "the form is compared"
    controller.load_state_dict(fixed.state_dict())
    assert controller.value == 0.3

    controller.update(*update)
    moved = controller.value
    assert moved != 0.3
    resumed = adaptive()
    resumed.load_state_dict(controller.state_dict())
    again = adaptive()
    again.load_state_dict(resumed.state_dict())
    assert again.value == moved


def test_controllers_come_from_their_section():
    section = SimpleNamespace(type="fixed", kl_coef=0.5, horizon=10, target_kl=0.1)
    fixed = get_kl_controller(section)
    fixed.update(current_kl=100.0, n_steps=100)
    fixed.load_state_dict(fixed.state_dict())
    assert isinstance(fixed, FixedKLController)
    assert fixed.value == 0.5
    section.type = "adaptive"
    adaptive = get_kl_controller(section)

    assert isinstance(adaptive, AdaptiveKLController)
    assert (adaptive.value, adaptive.target, adaptive.horizon) == (0.5, 0.1, 10)
    section.horizon = 0
    with pytest.raises(ConfigError, match="horizon above 0"):
        get_kl_controller(section)
    section.type = "pid"
    with pytest.raises(ConfigError, match="'pid'"):
        get_kl_controller(section)


@given(seeds, st.integers(1, 4), st.integers(1, 6))
def test_mismatch_metrics(seed, rows, width):
    mask, (drawn, noise) = random_mask(seed, rows, width), random_columns(seed, rows, width, 2)
    drawn, trained = -drawn.abs(), -drawn.abs() + 0.1 * noise
    pairs = [
        (p, q)
        for p, q, m in zip(drawn.flatten().tolist(), trained.flatten().tolist(), mask.flatten())
        if m
    ]

    if not pairs:
        with pytest.raises(ValueError, match="at least one response token"):
            mismatch_metrics(drawn, trained, mask)
        return

    dirty = torch.where(mask.bool(), drawn, float("nan"))
    metrics = mismatch_metrics(dirty, trained, mask)
    gaps = [abs(math.exp(p) - math.exp(q)) for p, q in pairs]
    weights = [math.exp(q - p) for p, q in pairs]
    mean = sum(gaps) / len(gaps)
    expected = {
        "training/rollout_probs_diff_max": max(gaps),
        "training/rollout_probs_diff_mean": mean,
        "training/rollout_probs_diff_std": math.sqrt(
            sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
        ),
        "training/rollout_kl": sum(p - q for p, q in pairs) / len(pairs),
        "training/rollout_kl_k3": sum(math.exp(q - p) - 1 - (q - p) for p, q in pairs) / len(pairs),
        "training/rollout_ess": sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)),
    }

    assert metrics == pytest.approx(expected, abs=1e-9)


def test_no_mismatch():
    tokens = torch.full((2, 3), -0.5)
    metrics = mismatch_metrics(tokens, tokens, torch.ones(2, 3))
    assert metrics.pop("training/rollout_ess") == 1.0
    assert set(metrics.values()) == {0.0}
