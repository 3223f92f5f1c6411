"""The noise is random and reproducible where required; filters are compared with slow reference
implementations."""

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.rollout import sampling
from verl.rollout.sampling import (
    negative_exponential_noise,
    noise_integers,
    row_keys,
    sample,
    sample_keys,
)
from verl.rollout.types import SamplingParams


def keys_of(count: int, *, seed: int = 0, step: int = 0, position: int = 0) -> torch.Tensor:
    keys = sample_keys(seed, step, np.arange(count))
    return torch.from_numpy(row_keys(keys, np.full(count, position)))


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return Pearson's statistic in standard deviations above its mean.

    With k degrees of freedom, the mean is k and the variance 2k.
    """
    expected = probabilities * counts.sum()
    freedom = int((expected > 0).sum()) - 1
    assert counts[expected == 0].sum() == 0
    terms = (counts - expected)[expected > 0] ** 2 / expected[expected > 0]
    return (float(terms.sum()) - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("by", ["sample", "position", "step", "seed"])
def test_frequencies_equal_the_softmax(by):
    torch.manual_seed(0)
    logits = torch.randn(50) * 1.5
    draws = 40_000

    if by == "sample":
        keys = keys_of(draws)
    elif by == "position":
        keys = torch.from_numpy(
            row_keys(np.repeat(sample_keys(0, 0, np.array([7])), draws), np.arange(draws))
        )
    else:
        each = [keys_of(1, **{by: number}) for number in range(draws // 8)]
        keys = torch.cat(each)

    params = SamplingParams(max_new_tokens=1, temperature=0.7)
    tokens, _ = sample(logits.expand(len(keys), -1), params, keys)
    assert chi_square(torch.bincount(tokens, minlength=50), (logits / 0.7).softmax(0)) < 4


@pytest.mark.parametrize(
    "filters", [{"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9}]
)
def test_frequencies_under_filters(filters):
    torch.manual_seed(1)
    logits = torch.randn(40) * 1.5
    draws = 30_000
    params = SamplingParams(max_new_tokens=1, **filters)
    tokens, _ = sample(logits.expand(draws, -1), params, keys_of(draws))
    kept = torch.tensor(
        [token in slow_filter(logits.softmax(0).tolist(), params) for token in range(40)]
    )
    assert (
        chi_square(
            torch.bincount(tokens, minlength=40), torch.where(kept, logits, -torch.inf).softmax(0)
        )
        < 4
    )


def test_draws_of_different_samples_and_positions_are_independent():
    """Compute chi-square of pairs: neighbors in sample id, in position, and in token id."""
    draws = 30_000
    sides = 8
    uniform = torch.full((sides * sides,), 1 / sides**2)
    bins = (noise_integers(keys_of(draws + 1), 2) >> 28).long()  # 3 bits of each integer
    later = (noise_integers(keys_of(draws + 1, position=1), 2) >> 28).long()
    low = (noise_integers(keys_of(draws + 1), 2) & 7).long()

    for one, other in (
        (bins[:-1, 0], bins[1:, 0]),
        (bins[:, 0], later[:, 0]),
        (bins[:, 0], bins[:, 1]),
        (low[:, 0], low[:, 1]),
        (low[:-1, 0], low[1:, 0]),
        (bins[:, 0], low[:, 0]),
    ):
        assert chi_square(torch.bincount(one * sides + other, minlength=sides**2), uniform) < 4


def test_no_row_repeats_another():
    keys = torch.cat([keys_of(2000, position=position) for position in range(20)])
    assert len(keys.unique(dim=0)) == len(keys)
    rows = noise_integers(keys[:4000], 8)
    assert len(rows.unique(dim=0)) == len(rows)


def test_the_draw_is_the_gumbel_max():
    torch.manual_seed(2)
    logits = torch.randn(500, 300) * 3
    keys = keys_of(500)
    tokens, _ = sample(logits, SamplingParams(max_new_tokens=1, temperature=0.9), keys)
    gumbel = -negative_exponential_noise(keys, 300).neg().log()
    assert torch.equal(tokens, (logits / 0.9 + gumbel).argmax(-1))


def test_an_impossible_token_is_never_drawn():
    logits = torch.full((2000, 5000), -torch.inf)
    logits[:, 17] = 0.0
    tokens, log_probs = sample(logits, SamplingParams(max_new_tokens=1), keys_of(2000))
    assert (tokens == 17).all()
    assert (log_probs == 0).all()


@settings(max_examples=50)
@given(
    rows=st.integers(1, 9),
    chunk=st.integers(1, 9),
    row=st.integers(0, 8),
    temperature=st.sampled_from([0, 0.6, 1]),
)
def test_a_draw_depends_only_on_its_own_row(rows, chunk, row, temperature):
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, 33, generator=generator)
    keys = keys_of(rows)
    params = SamplingParams(max_new_tokens=1, temperature=temperature, top_p=0.95)
    tokens, log_probs = sample(logits, params, keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "CHUNK_LOGITS", 33 * chunk)
        chunked_tokens, chunked_log_probs = sample(logits, params, keys)
    assert torch.equal(tokens, chunked_tokens)
    torch.testing.assert_close(log_probs, chunked_log_probs, rtol=0, atol=1e-6)
    one = slice(row % rows, row % rows + 1)
    assert sample(logits[one], params, keys[one])[0].item() == tokens[row % rows].item()


@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=30).map(
        lambda logits: [x / 8 for x in logits]
    ),
    st.integers(-1, 31),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
    st.integers(1, 40),
)
def test_filters_keep_the_tokens_of_a_slow_reference(logits, top_k, top_p, min_p, candidates):
    params = SamplingParams(max_new_tokens=1, top_k=top_k, top_p=top_p, min_p=min_p)
    weights = (torch.tensor(logits, dtype=torch.float64) - max(logits)).exp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "FIRST_CANDIDATES", candidates)
        kept = weights >= sampling.smallest_kept_weight(weights[None], params)[0]
    expected = slow_filter((weights / weights.sum()).tolist(), params)
    assert set(kept.nonzero()[:, 0].tolist()) == expected


def slow_filter(probabilities: list[float], params: SamplingParams) -> set[int]:
    """Filter by top-k, then top-p of the rest, then min-p; ties with the last one stay."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    if params.top_k > 0:
        order = [
            t
            for t in order
            if probabilities[t] >= probabilities[order[min(params.top_k, len(order)) - 1]]
        ]
        counted = order[: params.top_k]
    else:
        counted = order

    if params.top_p < 1:
        total = sum(probabilities[t] for t in counted)
        so_far = 0.0
        last = counted[0]
        for token in counted:
            if so_far >= params.top_p * total - 1e-12:
                break
            so_far += probabilities[token]
            last = token
        order = [t for t in order if probabilities[t] >= probabilities[last]]

    return {t for t in order if probabilities[t] >= params.min_p * probabilities[order[0]]}


def test_greedy_takes_the_largest_logit_and_gives_its_log_prob_at_temperature_1():
    torch.manual_seed(3)
    logits = torch.randn(20, 50).bfloat16()
    tokens, log_probs = sample(logits, SamplingParams(max_new_tokens=1, temperature=0), None)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(log_probs, logits.float().log_softmax(-1).amax(-1))


def test_a_draw_of_128_rows_is_fast():
    """Expect a tenth of a decode step of the tiny benchmark model, in CPU time.

    The bound is loose: other processes share the caches.
    """
    logits = torch.randn(128, 1000)
    keys = keys_of(128)
    params = SamplingParams(max_new_tokens=1)
    seconds = []
    for _ in range(50):
        start = time.thread_time()
        sample(logits, params, keys)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 5e-3


def test_the_rarest_noise_still_draws_the_only_remaining_token():
    keys = torch.from_numpy(row_keys(sample_keys(0, 0, np.array([43172])), np.zeros(1, np.int64)))
    assert negative_exponential_noise(keys, 64)[0, 58] == -22.0
    logits = torch.zeros(1, 64)
    logits[0, 58] = 5.0
    tokens, log_probs = sample(logits, SamplingParams(max_new_tokens=1, top_k=1), keys)
    assert tokens.tolist() == [58]
    assert log_probs[0] == pytest.approx(float(logits.log_softmax(-1)[0, 58]), abs=1e-6)
