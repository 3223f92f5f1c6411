"""Divergences over the whole vocabulary against sums word by word, and their gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.tensors import random_columns, seeds
from verl.algorithms.divergences import DIVERGENCES, divergence, divergence_gradient
from verl.utils.errors import ConfigError


def slow_kl(a: list[float], b: list[float]) -> float:
    return sum(x * math.log(x / y) for x, y in zip(a, b))


def slow_divergence(p: list[float], q: list[float], kind: str, beta: float) -> float:
    if kind == "reverse_kl":
        return slow_kl(p, q)
    if kind == "forward_kl":
        return slow_kl(q, p)
    mixture = [beta * y + (1 - beta) * x for x, y in zip(p, q)]
    return beta * slow_kl(q, mixture) + (1 - beta) * slow_kl(p, mixture)


@pytest.mark.parametrize("kind", DIVERGENCES)
@given(seeds, st.integers(1, 5), st.integers(2, 9), st.floats(0.01, 0.99))
def test_a_divergence_is_the_sum_over_words(kind, seed, tokens, words, beta):
    y, other = random_columns(seed, tokens, words, 2)
    log_p = y.log_softmax(-1)
    log_q = other.log_softmax(-1)
    pairs = zip(log_p.exp().tolist(), log_q.exp().tolist())
    expected = [slow_divergence(p, q, kind, beta) for p, q in pairs]
    assert divergence(log_p, log_q, kind, beta).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", DIVERGENCES)
@given(seeds, st.floats(0.01, 0.99))
def test_gradients_are_those_of_autograd(kind, seed, beta):
    y, other = random_columns(seed, 3, 7, 2)
    y = y.requires_grad_()
    log_q = other.log_softmax(-1)
    (expected,) = torch.autograd.grad(divergence(y.log_softmax(-1), log_q, kind, beta).sum(), y)
    with torch.no_grad():
        found = divergence_gradient(y.log_softmax(-1), log_q, kind, beta)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_the_generalized_jsd_lies_between_both_kl():
    y, other = random_columns(1, 3, 7, 2)
    log_p = y.log_softmax(-1)
    log_q = other.log_softmax(-1)
    for beta, scale, limit in ((1e-7, 1e-7, "forward_kl"), (1 - 1e-7, 1e-7, "reverse_kl")):
        got = divergence(log_p, log_q, "jsd", beta) / scale
        torch.testing.assert_close(got, divergence(log_p, log_q, limit), rtol=1e-5, atol=1e-6)
    half = divergence(log_p, log_q, "jsd", 0.5)
    torch.testing.assert_close(half, divergence(log_q, log_p, "jsd", 0.5))


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_far_apart_distributions_are_finite(kind):
    y = torch.tensor([[200.0, 0.0, -200.0]])
    log_p = y.log_softmax(-1)
    log_q = (-y).log_softmax(-1)
    assert divergence(log_p, log_q, kind).isfinite().all()
    assert divergence_gradient(log_p, log_q, kind).isfinite().all()


def test_what_is_unknown_is_named():
    log_p = torch.zeros(1, 2)
    for compute in (divergence, divergence_gradient):
        with pytest.raises(ConfigError, match="'kl2'"):
            compute(log_p, log_p, "kl2")
        with pytest.raises(ConfigError, match=r"between 0 and 1, got 1\.0"):
            compute(log_p, log_p, "jsd", 1.0)
