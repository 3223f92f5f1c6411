"""Compare every operation of DataProto with the same operation on a list of rows."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tests.protocol.batches import as_rows, batches, dtypes, kinds, make_batch
from verl import DataProto as PublicDataProto
from verl.protocol import (
    DataProto,
    DataProtoConfig,
    DataProtoItem,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)
from verl.utils.errors import BatchError

settings.register_profile("room", max_examples=40)
settings.load_profile("room")


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


@pytest.mark.parametrize("column", [[1, 2, 3], 3, "abc", None])
def test_a_tensor_column_that_is_none_is_named(column):
    with pytest.raises(BatchError, match="Column 'ids' must be a tensor, got .*non_tensors"):
        DataProto.from_dict(tensors={"ids": column})


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


@given(batches)
def test_select_pop_and_union_undo_each_other(data):
    rows = as_rows(data)
    names = list(dtypes(data))
    tensor_keys = [key for key in ("ids", "flag") if key in names]
    object_keys = [key for key in ("text",) if key in names]
    selected = data.select(tensor_keys, object_keys, ["step"])
    assert as_rows(selected) == [
        {key: row[key] for key in tensor_keys + object_keys} for row in rows
    ]

    assert as_rows(data.select()) == rows
    assert data.select(meta_info_keys=[]).meta_info == {}
    popped = data.pop(tensor_keys, object_keys, ["step"])
    assert set(dtypes(popped)) == {*tensor_keys, *object_keys}
    assert set(dtypes(data)) == set(names) - {*tensor_keys, *object_keys}
    assert (popped.meta_info, data.meta_info) == ({"step": 3}, {})
    assert data.union(popped) is data
    assert as_rows(data) == rows

    assert data.meta_info == {"step": 3}


def test_missing_keys_are_named_and_nothing_is_taken():
    data = make_batch(2)
    for act in (data.select, data.pop):
        with pytest.raises(ValueError, match=r"tensor column.*nope.*ids"):
            act(["ids", "nope"])
        with pytest.raises(ValueError, match=r"object column.*ids"):
            act(["ids"], ["ids"])
        with pytest.raises(ValueError, match=r"meta_info.*nope"):
            act(["ids"], ["text"], ["nope"])
    with pytest.raises(ValueError, match="ids"):
        make_batch(2, "objects").pop(["ids"])
    assert as_rows(data) == as_rows(make_batch(2))
    assert data.meta_info == {"step": 3}


def test_select_shares_memory_unless_deepcopy():
    data = make_batch(2)
    shared = data.select(["ids"])
    owned = data.select(["ids"], deepcopy=True)
    data.batch["ids"] += 1
    assert torch.equal(shared.batch["ids"], data.batch["ids"])
    assert torch.equal(owned.batch["ids"], data.batch["ids"] - 1)
    shared.union(DataProto.from_dict({"more": torch.zeros(2)}))
    shared.meta_info["new"] = 1
    assert "more" not in list(data.batch.keys())
    assert "new" not in data.meta_info


def test_union_rejects_unequal_values_and_changes_nothing():
    nan = float("nan")
    data = DataProto.from_dict(
        {"x": torch.tensor([1.0, nan])}, {"o": [{"a": [nan]}, "t"]}, {"m": nan}
    )
    same = DataProto.from_dict(
        {"x": torch.tensor([1.0, nan])}, {"o": [{"a": [float("nan")]}, "t"]}, {"m": nan, "k": 1}
    )
    assert data.union(same).meta_info["k"] == 1

    before = as_rows(data.select(["x"], ["o"]))
    for other, name in (
        (DataProto.from_dict({"y": torch.ones(2), "x": torch.tensor([1.0, 2.0])}), "x"),
        (DataProto.from_dict({"y": torch.ones(2), "x": torch.tensor([1, 2])}), "x"),
        (DataProto.from_dict({"y": torch.ones(2)}, {"o": [{"a": [1.0]}, "t"]}), "o"),
        (DataProto.from_dict({"y": torch.ones(2)}, {"o": [{"b": [nan]}, "t"]}), "o"),
        (DataProto.from_dict({"y": torch.ones(2)}, meta_info={"m": 1.0}), "m"),
    ):
        with pytest.raises(ValueError, match=rf"unequal values.*\['{name}'\]"):
            data.union(other)

    for other in (make_batch(3, "tensors"), make_batch(3, "objects")):
        with pytest.raises(ValueError, match="3"):
            data.union(other)

    assert repr(as_rows(data)) == repr(before)


def test_union_functions():
    one = TensorDict({"a": torch.ones(2)}, [2])
    other = TensorDict({"b": torch.zeros(2)}, [2])
    assert set(union_tensor_dict(one, other).keys()) == {"a", "b"}
    with pytest.raises(ValueError, match=r"\[2\] and \[3\]"):
        union_tensor_dict(one, TensorDict({}, [3]))
    with pytest.raises(ValueError, match="'a'"):
        union_tensor_dict(one, TensorDict({"a": torch.ones(2, dtype=torch.int64)}, [2]))
    assert set(union_numpy_dict({"a": np.ones(2)}, {"b": np.ones(2)})) == {"a", "b"}
    with pytest.raises(ValueError, match="'a'"):
        union_numpy_dict({"a": np.array(["x", None], object)}, {"a": np.array(["x", 0], object)})
    tensors = np.array([torch.ones(2), None], dtype=object)
    assert list(union_numpy_dict({"a": tensors}, {"a": copy.deepcopy(tensors)})) == ["a"]


def test_rename():
    data = make_batch(2)
    rows = as_rows(data)
    assert data.rename("ids", "tokens") is data
    data.rename(["tokens", "scores", "text"], ["scores", "tokens", "words"])
    expected = [
        {**row, "scores": row["ids"], "tokens": row["scores"], "words": row["text"]} for row in rows
    ]
    assert as_rows(data) == [
        {k: v for k, v in row.items() if k not in ("ids", "text")} for row in expected
    ]

    for old, new in (
        ("nope", "x"),
        ("flag", "half"),
        (["flag", "half"], ["x", "x"]),
        (["flag"], ["x", "y"]),
    ):
        with pytest.raises(ValueError, match="Cannot rename"):
            data.rename(old, new)

    assert set(dtypes(make_batch(1, "objects").rename("text", "words"))) == {
        "words",
        "ragged",
        "pair",
        "plain",
    }


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


@pytest.mark.parametrize("rows", [3, 0])
@pytest.mark.parametrize("kind", ["both", "tensors", "objects"])
def test_a_tensordict_holds_the_whole_batch(rows, kind):
    data = make_batch(rows, kind)
    packed = data.to_tensordict()
    assert packed.batch_size == (rows,)
    back = DataProto.from_tensordict(packed)
    assert as_rows(back) == as_rows(data)
    assert back.meta_info == data.meta_info

    data.meta_info["ids"] = data.meta_info["text"] = 1
    with pytest.raises(BatchError, match="one entry of each name"):
        data.to_tensordict()


def test_data_info_names_columns_and_meta_entries():
    lines = make_batch(3).get_data_info().splitlines()
    assert lines[0] == "3 rows"
    assert "ids: (3, 4) torch.int64" in lines
    assert "text: (3,) object" in lines
    assert "meta_info['step']: int" in lines


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
