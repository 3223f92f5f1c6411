"""Products of int8 matrices by Triton's interpreter: cut tiles, odd sizes, biases, broken rows."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.interpreter import interpreted
from verl.rollout.eight_bits import Rows, product, quantize
from verl.rollout.embedded.kernels.int8_product import int8_product, plan


def rows_of(count: int, width: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    return quantize(x * torch.logspace(-2, 2, count)[:, None], dtype=torch.int8)


# 2,064 numbers are cut in two, 1,040 not at all.
@pytest.mark.parametrize(
    ("count", "columns", "inner"), [(5, 48, 2064), (66, 144, 1040), (330, 272, 144)]
)
@pytest.mark.parametrize("biased", [False, True])
@interpreted
def test_products_are_those_of_torch(count: int, columns: int, inner: int, biased: bool):
    x = rows_of(count, inner, seed=0)
    weight = rows_of(columns, inner, seed=1)
    bias = torch.randn(columns) if biased else None
    expected = product(x, weight, bias, torch.float32)
    found = int8_product(x, weight, bias, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)

    if not biased:
        parts = int8_product(x, weight, None, torch.float32, may_split=True)
        assert parts.shape == ((2, count, columns) if inner > 2048 else (count, columns))
        whole = parts.view(-1, count, columns).sum(0)
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)


@interpreted
def test_broken_rows_stay_broken():
    x = torch.ones(3, 64)
    x[1, 4] = math.nan
    x[2, 5] = math.inf
    out = int8_product(quantize(x, dtype=torch.int8), rows_of(16, 64, 0), None, torch.float32)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert not out[2].isfinite().any()


@given(
    rows=st.integers(1, 40_000),
    columns=st.integers(1, 3000),
    inner=st.integers(1, 2000),
    may_split=st.booleans(),
)
def test_plans_cover_every_sum_once(rows: int, columns: int, inner: int, may_split: bool):
    inner *= 16
    layout = plan(rows, columns, inner, may_split=may_split)
    assert layout.split_inner * (layout.splits - 1) < inner <= layout.split_inner * layout.splits
    assert layout.split_inner % 128 == 0
    assert layout.splits == 1 or (may_split and layout.split_inner >= 1024)
