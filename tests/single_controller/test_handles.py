"""Typed handles: a call that does not wait, and a call that every rank answers."""

import pytest

from tests.single_controller.workers import Counter, rows
from verl.single_controller import GroupFuture, GroupOf, WorkerGroup, of_all_ranks, start


@pytest.fixture
def group() -> GroupOf[Counter]:
    made: GroupOf[Counter] = WorkerGroup(Counter(3))  # pyright: ignore[reportAssignmentType]
    return made


def test_a_started_call_is_a_future_with_the_answer(group: GroupOf[Counter]):
    future = start(group.double, rows(2), plus=1)
    assert isinstance(future, GroupFuture)
    assert future.result().batch["y"].tolist() == [1, 3]


def test_every_rank_answers(group: GroupOf[Counter]):
    assert of_all_ranks(group.tell, "hello") == ["3: hello"]
