"""Compare operations that repeat, pad, order and fold rows with the same on a list of rows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.batches import as_rows, batches, kinds, make_batch
from verl.protocol import (
    DataProto,
    DataProtoConfig,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from verl.utils.errors import BatchError


@given(batches, st.integers(0, 3), st.booleans())
def test_repeat(data, times, interleave):
    rows = as_rows(data)
    expected = [row for row in rows for _ in range(times)] if interleave else rows * times
    assert as_rows(data.repeat(times, interleave)) == expected
    assert as_rows(data.repeat()) == [row for row in rows for _ in range(2)]


@pytest.mark.parametrize("times", [1.5, 2.0, -1, "2", [1, 2, 1], torch.tensor(1.5)])
def test_repeat_takes_whole_numbers_alone(times):
    data = make_batch(3)
    with pytest.raises(BatchError, match="whole number of at least 0, got .* for each row"):
        data.repeat(times)


@pytest.mark.parametrize("times", [[1.5, 1.0, 0.5], [True, False, True], torch.ones(3)])
def test_sample_level_repeat_takes_whole_numbers_alone(times):
    with pytest.raises(BatchError, match="must be 3 whole numbers"):
        make_batch(3).sample_level_repeat(times)


@given(batches, st.data())
def test_sample_level_repeat(data, draw):
    times = draw.draw(st.lists(st.integers(0, 3), min_size=len(data), max_size=len(data)))
    expected = [row for row, count in zip(as_rows(data), times) for _ in range(count)]
    for form in (
        times,
        tuple(times),
        np.array(times, dtype=np.int64),
        torch.tensor(times, dtype=torch.int64),
    ):
        assert as_rows(data.sample_level_repeat(form)) == expected
    with pytest.raises(ValueError, match="repeat_times"):
        data.sample_level_repeat([*times, 1])


@given(batches, st.randoms(use_true_random=False))
def test_reorder_works_in_place(data, rng):
    order = list(range(len(data)))
    rng.shuffle(order)
    expected = [as_rows(data)[i] for i in order]
    assert data.reorder(torch.tensor(order, dtype=torch.int64)) is None
    assert as_rows(data) == expected


@given(batches, st.integers(1, 6))
def test_pad_to_divisor_and_back(data, divisor):
    rows = as_rows(data)
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0
    assert pad_size == len(padded) - len(data) < divisor
    assert as_rows(padded) == [rows[i % len(rows)] for i in range(len(padded))]
    assert as_rows(unpad_dataproto(padded, pad_size)) == rows
    assert as_rows(unpad_dataproto(padded, len(padded))) == []
    with pytest.raises(ValueError, match="pad_size"):
        unpad_dataproto(data, len(data) + 1)


@given(batches, st.integers(0, 4), st.sampled_from(["", "first", "last"]))
def test_padding_appends_copies_of_one_row(data, size, candidate):
    rows = as_rows(data)
    if size and not rows:
        with pytest.raises(ValueError, match="0 rows"):
            data.padding(size, candidate)
        return
    data.padding(size, candidate)
    assert as_rows(data) == rows + [rows[0 if candidate == "first" else -1] for _ in range(size)]
    with pytest.raises(ValueError, match="'middle'"):
        data.padding(1, "middle")


def test_padding_is_enabled_by_batch_or_by_process():
    assert not make_batch(1).is_padding_enabled()
    assert DataProto.from_dict({"a": torch.ones(1)}, auto_padding=True).is_padding_enabled()
    assert DataProto.from_single_dict({"a": torch.ones(1)}, auto_padding=True).is_padding_enabled()
    DataProtoConfig.auto_padding = True
    try:
        assert make_batch(1).is_padding_enabled()
        assert [len(chunk) for chunk in make_batch(3).chunk(2)] == [2, 1]
    finally:
        DataProtoConfig.auto_padding = False


@given(
    st.integers(0, 6),
    kinds,
    st.integers(1, 3),
    st.integers(0, 2),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_make_iterator(mini_batches, kind, size, epochs, shuffle, seed):
    data = make_batch(mini_batches * size, kind)
    rows = as_rows(data)

    def epoch_rows():
        kwargs = {"dataloader_kwargs": {"shuffle": True}} if shuffle else {}
        taken = list(data.make_iterator(size, epochs, seed=seed, **kwargs))
        assert all(len(piece) == size and piece.meta_info == {"step": 3} for piece in taken)
        flat = [row for piece in taken for row in as_rows(piece)]
        return [flat[i * len(rows) : (i + 1) * len(rows)] for i in range(epochs)]

    first = epoch_rows()
    assert first == epoch_rows()
    for epoch in first:
        assert sorted(epoch, key=repr) == sorted(rows, key=repr)
        assert shuffle or epoch == rows


def test_make_iterator_shuffles_anew_each_epoch():
    data = make_batch(30)
    one, other = (
        as_rows(x) for x in data.make_iterator(30, 2, seed=1, dataloader_kwargs={"shuffle": True})
    )
    assert one != other
    state = torch.get_rng_state()
    assert len(list(data.make_iterator(10, 2))) == 6
    assert len(list(data.make_iterator(10, 1, seed=0, dataloader_kwargs={"shuffle": True}))) == 3

    assert torch.equal(torch.get_rng_state(), state)
    unseeded = [
        as_rows(x)
        for _ in range(2)
        for x in data.make_iterator(30, 1, dataloader_kwargs={"shuffle": True})
    ]
    assert unseeded[0] != unseeded[1]
    with pytest.raises(ValueError, match="must divide the 30 rows"):
        data.make_iterator(7, 1)


@given(st.integers(0, 4), st.sampled_from(["both", "tensors"]), st.sampled_from([1, 2, 4]))
def test_unfold_column_chunks(rows, kind, n_split):
    data = make_batch(rows, kind)
    width = 4 // n_split
    expected = []
    for row in as_rows(data):
        for i in range(n_split):
            expected.append({**row, "ids": row["ids"][i * width : (i + 1) * width]})
    assert as_rows(data.unfold_column_chunks(n_split, ["ids"])) == expected
    assert as_rows(data.unfold_column_chunks(n_split)) == as_rows(data.repeat(n_split))


def test_unfold_column_chunks_cuts_arrays_and_rejects_lengths_that_do_not_divide():
    data = DataProto.from_dict(non_tensors={"a": np.arange(8).reshape(2, 4), "t": ["x", "y"]})
    unfolded = data.unfold_column_chunks(2, ["a"])
    assert unfolded.non_tensor_batch["a"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert unfolded.non_tensor_batch["t"].tolist() == ["x", "x", "y", "y"]
    for key, split in (("a", 3), ("t", 1), ("nope", 1), ("a", 0)):
        with pytest.raises(ValueError, match=f"'{key}'"):
            data.unfold_column_chunks(split, [key])


def test_unfold_column_chunks_cuts_lists_of_one_length():
    labels = [["a1", ["a", 2]], ["b1", "b2"], ["c1", "c2"]]
    data = DataProto.from_dict({"x": torch.arange(3)}, {"labels": labels, "of": [[1], [2, 3], [4]]})
    assert data.non_tensor_batch["labels"].shape == (3,), "lists stay lists"

    unfolded = data.unfold_column_chunks(2, ["labels"])
    expected = [["a1"], [["a", 2]], ["b1"], ["b2"], ["c1"], ["c2"]]
    assert unfolded.non_tensor_batch["labels"].dtype == object
    assert unfolded.non_tensor_batch["labels"].tolist() == expected
    assert unfolded.batch["x"].tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="'of'"):
        data.unfold_column_chunks(1, ["of"])


@given(st.integers(1, 3), st.integers(0, 3), kinds)
def test_fold_and_unfold_batch_dim(new_size, inner, kind):
    data = make_batch(new_size * inner, kind).select(
        non_tensor_batch_keys=["plain"] if kind != "tensors" else []
    )
    folded = fold_batch_dim(data, new_size)
    assert len(folded) == new_size

    for column in (folded.non_tensor_batch | folded._tensors()).values():
        assert column.shape[:2] == (new_size, inner)

    assert as_rows(unfold_batch_dim(folded)) == as_rows(data)
    with pytest.raises(ValueError, match="divide"):
        fold_batch_dim(make_batch(3), 2)
    with pytest.raises(ValueError, match="leading sizes.*scores"):
        unfold_batch_dim(make_batch(2))
