"""Futures in the form of verl 0.5, of calls that did not block."""

import pytest

from tests.single_controller.workers import Counter, rows
from verl.protocol import DataProto
from verl.single_controller import GroupFuture, WorkerGroup
from verl.single_controller.data_future import DataProtoFuture


def test_parts_of_a_pending_result():
    group = WorkerGroup(Counter(0))
    futures = [group.double(rows(count), blocking=False) for count in (4, 2)]
    assert all(isinstance(future, GroupFuture) for future in futures)
    whole = DataProtoFuture.concat(futures)
    assert whole.get().batch["y"].tolist() == [0, 2, 4, 6, 0, 2]
    parts = whole.chunk(3)
    assert [part.get().batch["y"].tolist() for part in parts] == [[0, 2], [4, 6], [0, 2]]
    assert [part.get().batch["y"].tolist() for part in parts[1].chunk(2)] == [[4], [6]]
    assert DataProtoFuture.concat(parts[::-1]).get().batch["y"].tolist() == [0, 2, 4, 6, 0, 2]


def test_the_result_of_one_call_can_be_cut():
    group = WorkerGroup(Counter(0))
    first, second = group.double(rows(4), blocking=False).chunk(2)
    assert isinstance(second, DataProtoFuture)
    assert second.get().batch["y"].tolist() == [4, 6]
    assert first.get().batch["y"].tolist() == [0, 2]

    (number,) = group.generate(rows(2), blocking=False).chunk(1)
    assert number.get().batch["number"].tolist() == [0, 0]
    with pytest.raises(ValueError, match="must give a DataProto each"):
        group.tell("hello", blocking=False).chunk(2)[0].get()


def test_a_part_may_be_the_argument_of_a_call():
    group = WorkerGroup(Counter(0))
    future = DataProtoFuture(
        DataProto.concat, [group.generate(rows(4), blocking=False)], lambda batch: batch[:3]
    )
    renamed = DataProtoFuture(DataProto.concat, [future], lambda batch: batch.rename("number", "x"))
    assert group.double(renamed, plus=1).batch["y"].tolist() == [1, 1, 1]
    later = group.double(rows(3), blocking=False)
    both = DataProtoFuture(lambda pieces: pieces[0].rename("y", "x"), [later])
    assert group.add(rows(3), both).batch["sum"].tolist() == [0, 3, 6]


def test_a_result_that_is_no_batch_is_reported():
    future = DataProtoFuture.concat([WorkerGroup(Counter(0)).tell("hello", blocking=False)])
    with pytest.raises(ValueError, match=r"must give a DataProto each, got \['list'\]"):
        future.get()
