"""The loop over mini-batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.algorithms.masked import AGGREGATION_MODES, aggregation_weights
from verl.distributed.collectives import ALONE
from verl.protocol import DataProto
from verl.workers.updates import global_weights, mini_batches


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


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_batch_itself_is_unchanged(shuffle):
    batch = rows(4)
    for piece in mini_batches(batch, 2, epochs=1, shuffle=shuffle, seed=0):
        piece.batch["x"] += 100
    assert batch.batch["x"].tolist() == [0, 1, 2, 3] or not shuffle


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_weights_of_one_process_equal_those_of_its_rows_to_the_bit(mode):
    mask = (torch.rand(7, 13, generator=torch.Generator().manual_seed(0)) > 0.4).long()
    for part in (mask, mask * 0, mask[:1], mask * (torch.arange(7) > 2)[:, None]):
        assert torch.equal(global_weights(part, mode, ALONE), aggregation_weights(part, mode))
