"""A call on a group is a call on every rank; rows come back in order, as many as there were."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.protocol import DataProto
from verl.single_controller import Dispatch, Execute, Worker, WorkerGroup, register, register_dispatch_mode
from verl.single_controller.dispatch import Arguments, DispatchMode, bind, dispatch_mode
from verl.utils.errors import ConfigError


def rows(count: int, start: int = 0) -> DataProto:
    numbers = torch.arange(start, start + count)
    return DataProto.from_dict(tensors={"x": numbers}, non_tensors={"name": [f"row {i}" for i in numbers.tolist()]})


class Counter(Worker):
    """Remembers what came."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.seen: list[int] = []

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: DataProto, *, plus: int = 0) -> DataProto:
        """Twice each number."""
        self.seen.append(len(batch))
        return DataProto.from_dict(tensors={"y": batch.batch["x"] * 2 + plus})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def sample(self, batch: DataProto, n: int) -> DataProto:
        return batch.repeat(n, interleave=True)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, one: DataProto, other: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"sum": one.batch["x"] + other.batch["x"]})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def tell(self, word: str) -> str:
        return f"{self.number}: {word}"

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def tell_first(self, word: str) -> str:
        return f"{self.number}: {word}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def tell_only_first(self, word: str) -> str:
        return f"{self.number}: {word}"

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, batch: DataProto) -> dict[str, float]:
        return {"rows": len(batch)}

    @register()
    def each(self, word: str) -> str:
        return f"{self.number}: {word}"

    def private(self) -> None: ...


class Ranks:
    """Several workers in this process behind the same `bind` that a group uses."""

    def __init__(self, world_size: int) -> None:
        self.workers = [Counter(number) for number in range(world_size)]

    def __getattr__(self, name: str):
        return bind(self._call, len(self.workers), getattr(Counter, name), name)

    def _call(self, name: str, per_rank: list[Arguments]) -> list:
        return [getattr(worker, name)(*args, **kwargs) for worker, (args, kwargs) in zip(self.workers, per_rank)]


@given(world_size=st.integers(1, 4), count=st.integers(1, 13), plus=st.integers(0, 3))
def test_every_row_is_answered_once_and_in_order(world_size, count, plus):
    ranks = Ranks(world_size)
    answer = ranks.double(rows(count), plus=plus)
    assert answer.batch["y"].tolist() == [2 * i + plus for i in range(count)]
    sizes = [worker.seen[0] for worker in ranks.workers]
    assert len(set(sizes)) == 1, "no rank waits for another"
    assert sum(sizes) < count + world_size


@given(world_size=st.integers(1, 4), count=st.integers(1, 9), n=st.integers(1, 3))
def test_several_answers_a_row_lose_the_padding_whole(world_size, count, n):
    answer = Ranks(world_size).sample(rows(count), n)
    assert answer.batch["x"].tolist() == [i for i in range(count) for _ in range(n)]
    assert list(answer.non_tensor_batch["name"]) == [f"row {i}" for i in range(count) for _ in range(n)]


@given(world_size=st.integers(1, 4), count=st.integers(1, 9))
def test_two_batches_of_one_call_stay_in_step(world_size, count):
    answer = Ranks(world_size).add(rows(count), other=rows(count, start=100))
    assert answer.batch["sum"].tolist() == [2 * i + 100 for i in range(count)]


def test_two_batches_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"as many rows, got \[2, 3\]"):
        Ranks(2).add(rows(2), rows(3))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_modes_without_batches(world_size):
    ranks = Ranks(world_size)
    everyone = [f"{number}: hello" for number in range(world_size)]
    assert ranks.tell("hello") == everyone
    assert ranks.tell_first("hello") == "0: hello"
    assert ranks.tell_only_first("hello") == ["0: hello"]
    assert ranks.each([f"w{i}" for i in range(world_size)]) == [f"{i}: w{i}" for i in range(world_size)]
    with pytest.raises(ValueError, match="one entry per rank"):
        ranks.each(["too many"] * (world_size + 1))
    assert ranks.update(rows(2 * world_size)) == {"rows": 2}


def test_the_batch_of_the_caller_is_left_alone():
    batch = rows(3)
    Ranks(2).sample(batch, 2)
    assert batch.batch["x"].tolist() == [0, 1, 2]
    assert list(batch.non_tensor_batch) == ["name"]


def test_a_group_offers_what_is_registered_and_says_what_is_not():
    group = WorkerGroup(Counter())
    assert group.double(rows(3)).batch["y"].tolist() == [0, 2, 4]
    assert group.double.__doc__ == "Twice each number."
    assert group.tell("hello") == ["0: hello"]
    assert group.world_size == 1
    with pytest.raises(AttributeError, match="Counter has no registered method 'private'. Decorate it"):
        group.private()


def test_a_subclass_inherits_what_is_registered():
    class More(Counter):
        @register(dispatch_mode=Dispatch.RANK_ZERO)
        def more(self) -> int:
            return 1

    group = WorkerGroup(More())
    assert group.more() == 1
    assert group.tell_first("hello") == "0: hello"


def test_a_users_mode():
    """The last rank's answer counts."""
    mode = DispatchMode(lambda size, args, kwargs: ([(args, kwargs)] * size, None), lambda outputs, _: outputs[-1])
    register_dispatch_mode("last_rank", mode)
    assert dispatch_mode("last_rank") is mode
    with pytest.raises(ConfigError, match="exists already"):
        register_dispatch_mode("last_rank", mode)
    with pytest.raises(ConfigError, match="Unknown dispatch mode 'nobody'"):
        dispatch_mode("nobody")

    class Last(Counter):
        @register(dispatch_mode="last_rank")
        def number_of(self) -> int:
            return self.number

    workers = [Last(number) for number in range(3)]
    call = bind(lambda name, per_rank: [getattr(w, name)() for w in workers], 3, Last.number_of, "number_of")
    assert call() == 2


def test_a_worker_knows_its_rank(monkeypatch):
    assert (Worker().rank, Worker().world_size) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (Worker().rank, Worker().world_size) == (3, 8)


def test_object_columns_travel_with_their_rows():
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def names(self, batch):
        return DataProto.from_dict(tensors={}, non_tensors={"name": np.array(batch.non_tensor_batch["name"])})

    call = bind(lambda name, per_rank: [names(None, *args, **kwargs) for args, kwargs in per_rank], 3, names, "names")
    assert list(call(rows(4)).non_tensor_batch["name"]) == [f"row {i}" for i in range(4)]
