"""Policy and value losses against token-by-token references, with gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.tensors import random_columns, seeds
from verl.algorithms.policy_losses import PolicyLossInputs, extra_losses, policy_losses, vanilla
from verl.algorithms.value_losses import clipped_value_loss
from verl.utils.errors import ConfigError

settings.register_profile("algorithms", max_examples=50)
settings.load_profile("algorithms")
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}


def policy_inputs(seed: int, size: int, spread: float = 1.0) -> PolicyLossInputs:
    (new, old, advantages, weights) = (column[0] for column in random_columns(seed, 1, size, 4))
    return PolicyLossInputs(
        new * spread, old * spread, advantages, weights.abs(), torch.arange(size) // 2
    )


def slow_token(new, old, advantage, low, high, c):
    """One token: loss, its derivative by the log-prob, whether clipped, whether clipped by the dual
    clip."""
    ratio = math.exp(max(min(new - old, 20.0), -20.0))
    surrogate = min(ratio * advantage, max(min(ratio, 1 + high), 1 - low) * advantage)
    is_clipped = surrogate < ratio * advantage
    is_dual = advantage < 0 and surrogate < c * advantage
    if is_dual:
        surrogate = c * advantage
    moves = not is_clipped and not is_dual and abs(new - old) <= 20
    return -surrogate, -ratio * advantage if moves else 0.0, is_clipped, is_dual


@given(seeds, st.integers(1, 12), st.sampled_from([0.1, 1.0, 15.0]))
def test_vanilla_is_dual_clip_ppo(seed, size, spread):
    inputs = policy_inputs(seed, size, spread)
    inputs = inputs._replace(log_probs=inputs.log_probs.requires_grad_())
    output = vanilla(inputs, **CLIP)
    rows = zip(*(column.tolist() for column in inputs[:3]))
    tokens = [slow_token(*row, *CLIP.values()) for row in rows]
    losses, slopes, clipped, dual = (
        torch.tensor(part, dtype=torch.float64) for part in zip(*tokens)
    )

    torch.testing.assert_close(output.loss, (losses * inputs.weights).sum())
    (gradient,) = torch.autograd.grad(output.loss, inputs.log_probs)
    torch.testing.assert_close(gradient, slopes * inputs.weights)
    assert torch.equal(output.means["pg_clipfrac"], clipped)
    assert torch.equal(output.means["pg_clipfrac_lower"], dual)
    difference = (inputs.old_log_probs - inputs.log_probs).detach().clamp(-20, 20)
    torch.testing.assert_close(output.means["ppo_kl"], difference)
    assert not any(mean.requires_grad for mean in output.means.values())


def test_vanilla_gradient_in_float64():
    # Ratios in every region, each well away from a kink.
    log_ratio = torch.tensor([0.0, 0.5, -0.5, 0.1, 0.9, 1.5, -1.0], dtype=torch.float64)
    old = torch.linspace(-2, -1, 7, dtype=torch.float64)
    for sign in (1.0, -1.0):
        advantages = sign * torch.linspace(0.5, 2, 7, dtype=torch.float64)

        def loss(log_probs, advantages=advantages):
            weights = torch.full_like(old, 0.3)
            rows = torch.zeros(7, dtype=torch.int64)
            return vanilla(PolicyLossInputs(log_probs, old, advantages, weights, rows), **CLIP).loss

        assert torch.autograd.gradcheck(loss, (old + log_ratio).requires_grad_())


def test_settings_of_other_losses_are_ignored_and_a_missing_one_is_not():
    inputs = policy_inputs(0, 3)
    same = policy_losses.get("vanilla")(inputs, **CLIP, kl_cov_ratio=0.1)
    assert torch.equal(same.loss, vanilla(inputs, **CLIP).loss)
    with pytest.raises(TypeError, match="clip_ratio_high"):
        vanilla(inputs, clip_ratio_low=0.2, clip_ratio_c=3.0)
    with pytest.raises(ConfigError, match="greater than 1"):
        vanilla(inputs, **{**CLIP, "clip_ratio_c": 1.0})


def test_a_users_loss_term_registers():
    @extra_losses.register("test_demonstrations")
    def demonstrations(inputs, columns):
        return -(inputs.log_probs * columns["is_demonstration"] * inputs.weights).sum()

    inputs = policy_inputs(1, 4)
    term = extra_losses.get("test_demonstrations")(
        inputs, {"is_demonstration": torch.tensor([1.0, 0, 0, 0])}
    )
    torch.testing.assert_close(term, -inputs.log_probs[0] * inputs.weights[0])


@given(seeds, st.integers(1, 12), st.sampled_from([0.1, 0.5, 10.0]))
def test_value_loss_is_clipped_per_token(seed, size, cliprange):
    values, old, returns, weights = (column[0] for column in random_columns(seed, 1, size, 4))
    output = clipped_value_loss(values, old, returns, weights, cliprange_value=cliprange)
    total = 0.0
    clipped = []
    for v, o, r, w in zip(values.tolist(), old.tolist(), returns.tolist(), weights.tolist()):
        near = min(max(v, o - cliprange), o + cliprange)
        total += w * 0.5 * max((v - r) ** 2, (near - r) ** 2)
        clipped.append(float((near - r) ** 2 > (v - r) ** 2))
    assert output.loss.item() == pytest.approx(total, abs=1e-12)
    assert output.means["vf_clipfrac"].tolist() == clipped
    assert torch.equal(output.means["vpred_mean"], values)


def test_value_loss_gradient_in_float64():
    values = torch.tensor([0.0, 0.3, 2.0, -2.0, 2.0], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(5, dtype=torch.float64)
    returns = torch.tensor([1.0, -1, 3, -3, -1], dtype=torch.float64)
    weights = torch.full((5,), 0.2, dtype=torch.float64)

    def loss(v):
        return clipped_value_loss(v, old, returns, weights, cliprange_value=0.5).loss

    assert torch.autograd.gradcheck(loss, values)
    loss(values).backward()
    # Moved past the range towards the return: no gradient. Past it and away from the return: pulled
    # back.
    expected = torch.tensor([-0.2, 0.26, 0.0, 0.0, 0.6], dtype=torch.float64)
    torch.testing.assert_close(values.grad, expected)
