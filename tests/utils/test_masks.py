"""Random masks stay within the given ratios."""

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers

from verl.utils.masks import create_random_mask

percents = integers(0, 100)


@given(integers(1, 120), percents, percents, percents)
def test_tokens_and_padding_are_within_their_ratios(width, one, other, left):
    low, high = sorted((one, other))
    ids = torch.zeros(5, width, dtype=torch.int64)
    ratios = (high / 100, left / 100, low / 100)

    if not any(low * width <= 100 * count <= high * width for count in range(1, width + 1)):
        with pytest.raises(ValueError, match=f"of {width} columns"):
            create_random_mask(ids, *ratios)
        return

    mask = create_random_mask(ids, *ratios)
    assert mask.dtype == torch.int64
    for row in mask.tolist():
        assert low * width <= 100 * sum(row) <= high * width
        start = row.index(1)
        assert 100 * start <= left * width
        assert row == [0] * start + [1] * sum(row) + [0] * (width - start - sum(row)), (
            "one run of tokens"
        )


def test_both_numbers_are_drawn_from_their_whole_ranges():
    torch.manual_seed(0)
    mask = create_random_mask(torch.zeros(2000, 10, dtype=torch.int64), 0.6, 0.3, 0.2)
    assert set(mask.sum(1).tolist()) == {2, 3, 4, 5, 6}
    assert set(mask.argmax(1).tolist()) == {0, 1, 2, 3}
    full = create_random_mask(torch.zeros(20, 10), 1.0, 0.5, 1.0)
    assert torch.equal(full, torch.ones(20, 10))


def test_invalid_ratios_are_reported():
    for high, left, low in (
        (1.1, 0, 0),
        (0.5, 0, 0.6),
        (0.5, 0, -0.1),
        (0.5, 1.1, 0),
        (0.5, -0.1, 0),
        (0, 0, 0),
    ):
        with pytest.raises(ValueError, match="Ratios must lie between 0 and 1"):
            create_random_mask(torch.zeros(2, 10), high, left, low)
