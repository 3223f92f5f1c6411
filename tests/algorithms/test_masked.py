"""Masked statistics, and aggregation of token losses against loops over sequences."""

import statistics

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.tensors import random_columns, random_mask, seeds, shapes, widen
from verl.algorithms.masked import (
    AGGREGATION_MODES,
    agg_loss,
    aggregation_weights,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
)
from verl.utils.errors import ConfigError

settings.register_profile("algorithms", max_examples=50)
settings.load_profile("algorithms")
modes = st.sampled_from(AGGREGATION_MODES)


def slow_loss(loss, mask, mode):
    """Sequence by sequence, as the modes are defined."""
    rows = [[x for x, keep in zip(*row) if keep] for row in zip(loss.tolist(), mask.tolist())]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return statistics.fmean(x for row in rows for x in row)
    if mode == "seq-mean-token-sum":
        return statistics.fmean(sum(row) for row in rows)
    if mode == "seq-mean-token-mean":
        return statistics.fmean(statistics.fmean(row) for row in rows)
    return statistics.fmean(sum(row) / mask.shape[1] for row in rows)


@given(seeds, shapes, modes)
def test_every_mode_is_its_definition(seed, shape, mode):
    mask, (loss,) = random_mask(seed, *shape), random_columns(seed, *shape, 1)
    expected = slow_loss(loss, mask, mode)
    assert agg_loss(loss, mask, mode).item() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    weights = aggregation_weights(mask, mode)
    assert weights.dtype == torch.float32
    assert (loss * weights).sum().item() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    dirty = torch.where(mask.bool(), loss, float("nan"))
    assert agg_loss(dirty, mask.bool(), mode).item() == pytest.approx(
        expected, rel=1e-12, abs=1e-12
    )


@given(seeds, shapes, modes, st.integers(0, 3))
def test_rows_of_padding_change_nothing(seed, shape, mode, extra):
    mask = random_mask(seed, *shape)
    padded = torch.cat([mask, torch.zeros(extra, shape[1], dtype=torch.int64)])
    weights = aggregation_weights(padded, mode)
    assert torch.equal(weights[: len(mask)], aggregation_weights(mask, mode))
    assert weights[len(mask) :].eq(0).all()


@given(seeds, shapes, modes)
def test_columns_of_padding_change_nothing_but_the_constant_of_dr_grpo(seed, shape, mode):
    mask = random_mask(seed, *shape)
    places = torch.arange(shape[1]) + 1
    wide = widen(mask, places, 0)
    constant = wide.shape[1] / shape[1] if mode == "seq-mean-token-sum-norm" else 1.0
    torch.testing.assert_close(
        aggregation_weights(wide, mode)[:, places] * constant, aggregation_weights(mask, mode)
    )


@given(seeds, shapes, modes, st.randoms(use_true_random=False))
def test_micro_batches_add_up_in_any_order(seed, shape, mode, rng):
    mask, (loss,) = random_mask(seed, *shape), random_columns(seed, *shape, 1)
    weights = aggregation_weights(mask, mode)
    order = list(range(shape[0]))
    rng.shuffle(order)
    assert torch.equal(aggregation_weights(mask[order], mode), weights[order])
    parts = torch.tensor(order).split(2)
    total = sum((loss[part] * weights[part]).sum() for part in parts)
    torch.testing.assert_close(total, (loss * weights).sum(), rtol=1e-12, atol=1e-12)
    if mode != "token-mean":
        count = int((mask.sum(-1) > 0).sum())
        for part in parts:
            assert torch.equal(
                aggregation_weights(mask[part], mode, num_sequences=count), weights[part]
            )


def test_long_batches_are_counted_exactly():
    mask = torch.ones(1, 2**24 + 2, dtype=torch.bool)
    mask[0, 0] = False
    assert (
        aggregation_weights(mask, "token-mean")[0, 1].item() == torch.tensor(1 / (2**24 + 1)).item()
    )


def test_unknown_mode_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"seq-mean-token-sum-norm.*'mean'"):
        aggregation_weights(torch.ones(1, 1), "mean")


@given(seeds, shapes)
def test_statistics_look_under_the_mask_alone(seed, shape):
    mask, (values,) = random_mask(seed, *shape), random_columns(seed, *shape, 1)
    kept = [x for x, keep in zip(values.flatten().tolist(), mask.flatten().tolist()) if keep]
    values = torch.where(mask.bool(), values, float("nan"))
    mean = statistics.fmean(kept) if kept else 0.0
    var = statistics.variance(kept) if len(kept) > 1 else 0.0
    population = statistics.pvariance(kept) if kept else 0.0
    assert masked_sum(values, mask).item() == pytest.approx(sum(kept))
    assert masked_mean(values, mask).item() == pytest.approx(mean)

    assert masked_var(values, mask).item() == pytest.approx(var, abs=1e-12)
    assert masked_var(values, mask, unbiased=False).item() == pytest.approx(population, abs=1e-12)
    for row, value in enumerate(masked_mean(values, mask, dim=-1)):
        assert value.item() == pytest.approx(masked_mean(values[row], mask[row]).item())
    whitened = masked_whiten(values, mask)
    unshifted = masked_whiten(values, mask, shift_mean=False)
    assert whitened.isfinite().all()
    assert whitened[~mask.bool()].eq(0).all()

    if len(kept) > 1:
        assert masked_mean(whitened, mask).item() == pytest.approx(0, abs=1e-9)
        assert masked_var(whitened, mask).item() == pytest.approx(1, abs=1e-3 if var > 1e-4 else 1)
        torch.testing.assert_close(unshifted[mask.bool()], (whitened + mean)[mask.bool()])


def test_shapes_are_checked_under_test():
    with pytest.raises(jaxtyping.TypeCheckError):
        agg_loss(torch.zeros(2, 3), torch.zeros(3, 2), "token-mean")
