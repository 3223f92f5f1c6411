"""Compare operations that select, join and rename columns with the same on a list of rows."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from tensordict import TensorDict

from tests.protocol.batches import as_rows, batches, dtypes, make_batch
from verl.protocol import (
    DataProto,
    union_numpy_dict,
    union_tensor_dict,
)
from verl.utils.errors import BatchError


@pytest.mark.parametrize("column", [[1, 2, 3], 3, "abc", None])
def test_a_tensor_column_that_is_none_is_named(column):
    with pytest.raises(BatchError, match="Column 'ids' must be a tensor, got .*non_tensors"):
        DataProto.from_dict(tensors={"ids": column})


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
