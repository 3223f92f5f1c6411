"""Compare operations of DataProto with the same operation on a list of rows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.protocol.batches import as_rows, batches, dtypes, kinds, make_batch
from verl import DataProto as PublicDataProto
from verl.protocol import (
    DataProto,
    DataProtoConfig,
    DataProtoItem,
    collate_fn,
    union_numpy_dict,
    unpad_dataproto,
)


def test_public_name():
    assert PublicDataProto is DataProto


@given(batches, st.integers(1, 4))
def test_concat_undoes_chunk_and_split(data, pieces):
    expected = as_rows(data)
    split = data.split(pieces)
    assert [len(piece) for piece in split] == [
        len(expected[i : i + pieces]) for i in range(0, len(expected), pieces)
    ]
    if split:
        assert as_rows(DataProto.concat(split)) == expected

    if len(data) % pieces:
        with pytest.raises(ValueError, match=f"{len(data)} rows and {pieces} chunks"):
            data.chunk(pieces)
        data.meta_info[DataProtoConfig.auto_padding_key] = True

    chunks = data.chunk(pieces)
    sizes = [len(chunk) for chunk in chunks]
    assert len(sizes) == pieces
    assert max(sizes) - min(sizes) <= 1
    joined = DataProto.concat(chunks)
    assert as_rows(joined) == expected
    assert dtypes(joined) == dtypes(data)
    assert joined.meta_info == data.meta_info


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), kinds)
def test_concat_appends_rows_in_order(sizes, kind):
    pieces = [make_batch(size, kind, start=100 * i) for i, size in enumerate(sizes)]
    assert as_rows(DataProto.concat(pieces)) == [row for piece in pieces for row in as_rows(piece)]


def test_concat_names_the_columns_that_differ():
    data = make_batch(2)
    other = make_batch(2)
    other.batch["extra"] = torch.zeros(2)
    with pytest.raises(ValueError, match="extra"):
        DataProto.concat([data, other])
    with pytest.raises(ValueError, match="1 differs from 0.*ragged"):
        DataProto.concat([data, make_batch(2, "tensors")])
    wide = make_batch(2)

    wide.batch["ids"] = torch.zeros(2, 9)
    with pytest.raises(ValueError, match=r"ids.*9"):
        DataProto.concat([data, wide])
    moved = (
        DataProto.from_dict({"x": torch.zeros(2)}),
        DataProto.from_dict(non_tensors={"x": np.zeros(2)}),
    )
    with pytest.raises(ValueError, match="x"):
        DataProto.concat(list(moved))
    with pytest.raises(ValueError, match="empty list"):
        DataProto.concat([])


@given(batches, st.data())
def test_indexing_and_slicing_follow_python(data, draw):
    expected = as_rows(data)
    bound = st.none() | st.integers(-9, 9)
    cut = slice(
        draw.draw(bound), draw.draw(bound), draw.draw(st.sampled_from([None, 1, 2, 3, -1, -2]))
    )
    assert as_rows(data[cut]) == expected[cut]
    assert as_rows(data.slice(cut.start, cut.stop, cut.step)) == expected[cut]
    mask = draw.draw(st.lists(st.booleans(), min_size=len(data), max_size=len(data)))

    kept = [row for row, keep in zip(expected, mask) if keep]
    for form in (mask, np.array(mask, dtype=bool), torch.tensor(mask, dtype=torch.bool)):
        assert as_rows(data[form]) == kept
    if expected:
        index = draw.draw(st.lists(st.integers(-len(data), len(data) - 1), max_size=9))
        for form in (
            index,
            np.array(index, dtype=np.int64),
            torch.tensor(index, dtype=torch.int32),
        ):
            picked = data[form]
            assert as_rows(picked) == [expected[i] for i in index]
            assert dtypes(picked) == dtypes(data)


@given(batches)
def test_items_are_rows_and_collate_puts_them_back(data):
    items = list(data)
    assert len(items) == len(data)
    assert all(isinstance(item, DataProtoItem) for item in items)
    if not items:
        with pytest.raises(IndexError):
            data[0]
        with pytest.raises(ValueError, match="at least one row"):
            collate_fn(items)
        return
    assert as_rows(collate_fn(items)) == as_rows(data)
    assert data[-1].non_tensor_batch == items[-1].non_tensor_batch
    with pytest.raises(IndexError):
        data[len(data)]


def test_ranges_and_numpy_and_torch_integers_are_valid_indices():
    data = make_batch(4)
    rows = as_rows(data)
    assert as_rows(data[range(1, 3)]) == rows[1:3]
    for number in (np.int64(2), torch.tensor(2)):
        assert data[number].non_tensor_batch["text"] == "row 2"
        assert data[number].batch["ids"].tolist() == rows[2]["ids"]


@pytest.mark.parametrize("chunks", [0, -1])
def test_a_number_of_chunks_below_one_is_named(chunks: int):
    with pytest.raises(ValueError, match=rf"^chunks must be at least 1, got {chunks}\.$"):
        make_batch(3).chunk(chunks)


def test_bad_indices_are_rejected():
    data = make_batch(3)
    with pytest.raises(IndexError, match="3 rows"):
        data[[0, 3]]
    for row in (3, -4):
        with pytest.raises(IndexError, match=f"Row {row} is not among 3 rows"):
            data[row]
    with pytest.raises(TypeError):
        data[1.5]
    with pytest.raises(ValueError, match="one entry for each of the 3 rows"):
        data[[True, False]]
    with pytest.raises(ValueError, match="int or bool"):
        data[[0.5]]
    with pytest.raises(ValueError, match="1-D"):
        data.select_idxs([[0, 1]])
    with pytest.raises(TypeError):
        data["ids"]


def test_an_empty_batch_has_no_rows():
    for empty in (DataProto(), DataProto(batch=None, non_tensor_batch=None, meta_info=None)):
        assert len(empty) == 0
        assert empty.non_tensor_batch == {}
        assert empty.meta_info == {}


def test_wrong_arguments_are_assertion_errors_too():
    data = make_batch(3)
    wrong = [
        lambda: data.chunk(2),
        lambda: data.pop(["nothing"]),
        lambda: data.make_iterator(2, 1),
        lambda: DataProto.from_dict({"a": torch.ones(2), "b": torch.ones(3)}),
        lambda: DataProto.from_dict({"a": torch.ones(2)}, num_batch_dims=2),
        lambda: DataProto(batch=None, non_tensor_batch={"a": [1]}),
        lambda: union_numpy_dict({"a": np.ones(2)}, {"a": np.zeros(2)}),
        lambda: data.union(DataProto.from_dict(meta_info={}, non_tensors={"plain": [0, 0, 0]})),
        lambda: unpad_dataproto(data, 4),
    ]

    for call in wrong:
        with pytest.raises(AssertionError):
            call()


def test_inconsistent_batches_are_rejected_with_names():
    with pytest.raises(ValueError, match=r"'b': \(3,\)"):
        DataProto.from_dict({"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(ValueError, match="'o' must be a numpy array of 2 rows.*got 3 rows"):
        DataProto.from_dict({"a": torch.ones(2)}, {"o": [1, 2, 3]})
    with pytest.raises(ValueError, match="'p'.*got 1 rows"):
        DataProto.from_dict(non_tensors={"o": [1, 2], "p": [1]})
    with pytest.raises(ValueError, match="'o'.*list"):
        DataProto(non_tensor_batch={"o": [1, 2]})  # pyright: ignore
    with pytest.raises(ValueError, match="'a': 'list'"):
        DataProto.from_single_dict({"a": [1]})
    with pytest.raises(ValueError, match=r"several without object columns.*\['o'\]"):
        DataProto.from_dict({"a": torch.ones(2, 3)}, {"o": [1, 2]}, num_batch_dims=2)
    with pytest.raises(ValueError, match="got 0"):
        DataProto(batch=TensorDict({}, []))

    data = make_batch(2)
    data.non_tensor_batch["late"] = np.zeros(5)
    with pytest.raises(ValueError, match="late"):
        data.check_consistency()


def test_from_dict_forms():
    assert len(DataProto()) == 0 == len(DataProto.from_dict())
    two = DataProto.from_dict({"a": torch.ones(2, 3, 4)}, num_batch_dims=2)
    assert two.batch.batch_size == (2, 3)
    assert two.repeat(2).batch.batch_size == (4, 3)
    lists = DataProto.from_dict(non_tensors={"pairs": [[1, 2], [3, 4]]}).non_tensor_batch["pairs"]
    assert lists.shape == (2,)
    assert lists[1] == [3, 4]
    single = DataProto.from_single_dict(
        {"a": torch.ones(2), "o": np.array(["x", "y"], object)}, meta_info={"m": 1}
    )

    assert (list(single.batch.keys()), list(single.non_tensor_batch), single.meta_info) == (
        ["a"],
        ["o"],
        {"m": 1},
    )


@given(batches)
def test_no_operation_writes_into_its_source(data):
    before = as_rows(data)
    meta = dict(data.meta_info)
    for result in (data.repeat(2), data.select(), data.slice(), data[[0] if len(data) else []]):
        result.meta_info["x"] = 1
        result.non_tensor_batch["new"] = np.zeros(len(result))
        if result.batch is not None:
            result.batch["new"] = torch.zeros(len(result))
    assert as_rows(data) == before
    assert data.meta_info == meta


def test_slices_are_views():
    data = make_batch(4)
    data[1:3].batch["ids"].zero_()
    assert data.batch["ids"].sum(-1).eq(0).tolist() == [False, True, True, False]
    data.chunk(2)[1].batch["scores"].fill_(9)
    assert data.batch["scores"].eq(9).tolist() == [False, False, True, True]


def test_to_and_print_size(capsys):
    data = make_batch(2)
    assert data.to("cpu") is data
    assert make_batch(2, "objects").to("cpu").batch is None
    data.print_size("before: ")
    make_batch(0).print_size()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("before: 2 rows, 0.000 MiB of tensors")
    assert lines[1].startswith("0 rows")
