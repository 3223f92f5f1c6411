"""The loop over mini-batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.algorithms.masked import AGGREGATION_MODES, aggregation_weights
from verl.distributed.collectives import ALONE, Axis
from verl.protocol import DataProto
from verl.utils.errors import ConfigError, DataError
from verl.workers.updates import global_weights, mini_batches, rows_of_a_rank


def rows(count: int) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(count)})


@given(
    count=st.integers(1, 12),
    size=st.integers(1, 14),
    epochs=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_every_row_is_used_once_an_epoch(count, size, epochs, shuffle):
    pieces = [
        piece.batch["x"].tolist()
        for piece in mini_batches(rows(count), size, epochs=epochs, shuffle=shuffle, seed=3)
    ]
    per_epoch = -(-count // size)
    assert len(pieces) == epochs * per_epoch
    for epoch in range(epochs):
        seen = [
            row for piece in pieces[epoch * per_epoch : (epoch + 1) * per_epoch] for row in piece
        ]
        assert sorted(seen) == list(range(count))
        assert shuffle or seen == list(range(count))
    assert all(len(piece) == size for piece in pieces[: per_epoch - 1])


def test_shuffled_epochs_differ_and_repeat_with_the_seed():
    def orders(seed: int) -> list[list[int]]:
        return [
            piece.batch["x"].tolist()
            for piece in mini_batches(rows(8), 8, epochs=2, shuffle=True, seed=seed)
        ]

    assert orders(0) == orders(0)
    assert orders(0)[0] != orders(0)[1]
    assert orders(0) != orders(1)


@pytest.fixture
def two_ranks(monkeypatch):
    """Return the axis of two ranks with equally many rows."""
    monkeypatch.setattr("verl.workers.updates.max_of", lambda number, axis: number)
    return Axis(size=2)


@pytest.mark.parametrize(("asked", "expected"), [(None, 4), (2, 1), (6, 3), (7, 4), (8, 4)])
def test_a_mini_batch_is_dealt_evenly(two_ranks, asked, expected):
    """Also where the whole batch leaves out a row that pads it."""
    assert rows_of_a_rank(rows(4), asked, two_ranks) == expected


@pytest.mark.parametrize(("asked", "fitting"), [(1, "fit: 2 rows"), (5, "fit: 4 or 6 rows")])
def test_a_mini_batch_that_ranks_do_not_divide_is_an_error(two_ranks, asked, fitting):
    with pytest.raises(ConfigError, match=f"got 2 and {asked}. Nearest that {fitting}"):
        rows_of_a_rank(rows(4), asked, two_ranks)


def test_an_update_without_rows_is_an_error():
    with pytest.raises(DataError, match="got a batch without any"):
        rows_of_a_rank(rows(0), None, ALONE)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_weights_of_one_process_equal_those_of_its_rows_to_the_bit(mode):
    mask = (torch.rand(7, 13, generator=torch.Generator().manual_seed(0)) > 0.4).long()
    for part in (mask, mask * 0, mask[:1], mask * (torch.arange(7) > 2)[:, None]):
        assert torch.equal(global_weights(part, mode, ALONE), aggregation_weights(part, mode))
