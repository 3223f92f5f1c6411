"""A call on a group is a call on every rank; rows return in order, as many as there were."""

import inspect
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.single_controller.workers import Counter, Other, negated, rows, with_lengths
from verl.protocol import DataProto
from verl.single_controller import (
    Dealt,
    Dispatch,
    Execute,
    GroupFuture,
    Worker,
    WorkerGroup,
    get_predefined_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from verl.single_controller.dispatch import CALL_PLAN, MODES, find_dispatch_mode
from verl.single_controller.in_process import InProcess
from verl.single_controller.spmd import LocalPool
from verl.utils.errors import ConfigError
from verl.utils.pickling import pack_tensor, unpack_tensor


def several(
    size: int, worker_class: type[Worker] = Counter, data_ranks: list[int] | None = None
) -> WorkerGroup:
    """Return a group of workers in this process, with the interface of a group of processes."""
    workers = [worker_class(number) for number in range(size)]  # pyright: ignore[reportCallIssue]
    data_ranks = data_ranks or list(range(size))
    ranks = InProcess(workers)
    return WorkerGroup.over(ranks, "counter", worker_class, data_ranks, range(size))


def workers_of(group: WorkerGroup) -> list[Counter]:
    return group._ranks.workers  # pyright: ignore[reportAttributeAccessIssue]


sizes = st.integers(1, 4)
some_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=13)


@given(sizes, st.integers(1, 13), st.integers(0, 3))
def test_every_row_is_answered_once_and_in_order(size, count, plus):
    group = several(size)
    answer = group.double(rows(count), plus=plus)
    assert answer.batch["y"].tolist() == [2 * i + plus for i in range(count)]
    seen = [worker.seen[0] for worker in workers_of(group)]
    assert min(seen) >= 1, "no rank is missing in the others' collectives"
    assert max(seen) - min(seen) <= 1


@given(sizes, some_lengths, st.integers(1, 3))
def test_rows_dealt_by_tokens_come_back_in_order_with_all_their_answers(size, lengths, n):
    answer = several(size).sample(with_lengths(lengths), n)
    assert answer.batch["x"].tolist() == [i for i in range(len(lengths)) for _ in range(n)]
    assert list(answer.non_tensor_batch["name"]) == [
        f"row {i}" for i in range(len(lengths)) for _ in range(n)
    ]


def test_ranks_get_equal_tokens_not_equal_rows():
    group = several(2)
    group.double(with_lengths([30, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]))
    assert sorted(worker.seen[0] for worker in workers_of(group)) == [1, 10]


@given(sizes, some_lengths)
def test_two_batches_of_one_call_stay_in_step(size, lengths):
    answer = several(size).add(with_lengths(lengths), other=rows(len(lengths), start=100))
    assert answer.batch["sum"].tolist() == [2 * i + 100 for i in range(len(lengths))]


def test_values_that_cannot_be_split_are_reported():
    with pytest.raises(ValueError, match=r"same number of rows, got \[2, 3\]"):
        several(2).add(rows(2), rows(3))
    with pytest.raises(ValueError, match="without rows"):
        several(2).double(rows(0))

    class Picky(Counter):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def even(self, batch: DataProto) -> DataProto:
            return batch[[i for i, x in enumerate(batch.batch["x"].tolist()) if x % 2 == 0]]

    with pytest.raises(ValueError, match="equally many to each"):
        several(2, Picky).even(with_lengths([1, 9, 1, 1]))


@given(sizes, st.integers(1, 13))
def test_rows_added_for_metrics_are_masked(size, count):
    given_to: list[DataProto] = []

    class Keeper(Counter):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
        def keep(self, batch: DataProto) -> int:
            given_to.append(batch)
            return len(batch)

    batch = with_lengths(list(range(1, count + 1)), mask="response_mask")
    assert several(size, Keeper).keep(batch) == -(-count // size), "as many rows for each rank"
    assert len({len(share) for share in given_to}) == 1
    counted = [
        row
        for share in given_to
        for row in range(len(share))
        if share.batch["response_mask"][row].any()
    ]
    assert len(counted) == count
    total = sum(
        (share.batch["response_mask"].sum(-1) * share.batch["x"]).sum().item() for share in given_to
    )
    assert total == sum((i + 1) * i for i in range(count))


def test_without_a_mask_no_row_is_added_for_metrics():
    group = several(2)
    group.update(rows(3))
    assert sorted(worker.seen[0] for worker in workers_of(group)) == [1, 2]
    with pytest.raises(ValueError, match="'response_mask' needs at least one row for each of 4"):
        several(4).update(rows(3))


def test_a_caller_can_distribute_the_rows():
    group = several(2)
    answer = group.double(Dealt(rows(4), [[3], [2, 0, 1]]))
    assert answer.batch["y"].tolist() == [0, 2, 4, 6]
    assert [worker.seen for worker in workers_of(group)] == [[1], [3]]
    with pytest.raises(ValueError, match="to 3 shares"):
        several(3).double(Dealt(rows(4), [[3], [2, 0, 1]]))
    assert several(1).double(Dealt(rows(2), [[0, 1]])).batch["y"].tolist() == [0, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_modes_without_batches(size):
    group = several(size)
    everyone = [f"{number}: hello" for number in range(size)]
    assert group.tell("hello") == everyone
    assert group.tell_first("hello") == "0: hello"
    assert group.tell_only_first("hello") == "0: hello"  # as verl 0.5's execute_rank_zero
    assert group.each([f"w{i}" for i in range(size)]) == [f"{i}: w{i}" for i in range(size)]
    with pytest.raises(ValueError, match="one entry per rank"):
        group.each(["too many"] * (size + 1))
    assert group.each("word") == [f"{i}: word" for i in range(size)]
    assert group.apply(negated, rows(5)).batch["y"].tolist() == [0, -1, -2, -3, -4]


def test_ranks_that_work_on_the_same_rows_answer_once():
    group = several(4, data_ranks=[0, 0, 1, 1])
    assert group.double(rows(5)).batch["y"].tolist() == [0, 2, 4, 6, 8]
    assert [worker.seen for worker in workers_of(group)] == [[3], [3], [2], [2]]
    assert group.generate(rows(5)).batch["number"].tolist() == [0, 0, 0, 2, 2], "first of its share"
    assert group.share([1, 2]) == [1, 2]
    assert len(group.tell("hello")) == 4


def test_the_batch_of_the_caller_is_unchanged():
    batch = rows(3)
    several(2).sample(batch, 2)
    assert batch.batch["x"].tolist() == [0, 1, 2]
    assert list(batch.non_tensor_batch) == ["name"]


@pytest.mark.parametrize("size", [1, 3])
def test_a_call_that_does_not_block_returns_a_future(size):
    group = several(size)
    future = group.double_later(rows(4))
    assert isinstance(future, GroupFuture)
    assert group.double(future, plus=1).batch["y"].tolist() == [1, 5, 9, 13], (
        "resolved where it is an argument"
    )
    assert group.add(rows(4), other=future).batch["sum"].tolist() == [0, 3, 6, 9]
    assert future.get() is future.result()
    assert future.done()


def test_a_call_can_be_awaited_later_and_calls_keep_their_order():
    class Slow(Counter):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def wait_for(self, event: threading.Event) -> int:
            assert event.wait(10)
            self.seen.append(1)
            return threading.get_ident()

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def fail(self) -> None:
            raise KeyError("not there")

    pool = LocalPool()
    event = threading.Event()
    slow = pool.start("slow", Slow, 0)
    other = pool.start("other", Counter, 1)
    future = slow.wait_for(event, blocking=False)
    assert not future.done(), "the caller goes on"
    threading.Timer(0.1, event.set).start()
    assert other.tell("hello") == ["1: hello"]
    assert future.done(), "calls of one process come one after another, also those of another role"
    assert workers_of(slow)[0].seen == [1]
    assert future.result() != [threading.get_ident()]
    assert slow.wait_for(event) == [threading.get_ident()]
    with pytest.raises(KeyError, match="not there"):
        slow.fail(blocking=False).result()


def test_a_method_can_receive_a_future_without_resolving_it():
    class Patient(Counter):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL, materialize_futures=False)
        def kind(self, value: object) -> str:
            return type(value).__name__

    group = several(1, Patient)
    assert group.kind(group.double_later(rows(1))) == ["GroupFuture"]


def test_a_future_without_the_names_of_its_answer_says_get():
    class Patient(Counter):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL, materialize_futures=False)
        def first(self, value: Any) -> Any:
            return value.batch["y"][0]

        @register(dispatch_mode=Dispatch.ONE_TO_ALL, materialize_futures=False)
        def read(self, value: Any) -> int:
            return len(value.get())

    group = several(1, Patient)
    future = group.double_later(rows(2))
    with pytest.raises(
        AttributeError, match=r"double_later has no 'batch'. Call its get\(\) first"
    ):
        _ = future.batch
    with pytest.raises(AttributeError, match=r"has no 'batch'. Call its get\(\) first"):
        group.first(future)
    assert group.read(future) == [2]
    assert not hasattr(future, "__len__")


def test_a_group_offers_registered_methods_and_reports_others():
    group = WorkerGroup(Counter(0))
    assert group.double(rows(3)).batch["y"].tolist() == [0, 2, 4]
    assert group.tell("hello") == ["0: hello"]
    assert group.world_size == 1
    with pytest.raises(
        AttributeError, match="Counter has no registered method 'private'. Decorate it"
    ):
        group.private()


def test_a_bound_method_keeps_signature_and_docstring():
    method = WorkerGroup(Counter(0)).double
    assert method.__doc__ == "Double each number."
    assert method.__name__ == "double"
    parameters = inspect.signature(method).parameters
    assert list(parameters) == ["batch", "plus", "deadline_s", "blocking", "on_emit"]
    assert parameters["plus"].default == 0
    assert parameters["deadline_s"].default is None, "that of the group"
    assert parameters["blocking"].default is True
    assert inspect.signature(method).return_annotation is DataProto
    assert method(rows(1), deadline_s=1.0).batch["y"].tolist() == [0]


def test_a_name_that_calls_need_themselves_is_rejected():
    class Greedy(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def wait(self, deadline_s: float) -> None: ...

    with pytest.raises(ConfigError, match=r"Greedy.wait has a parameter 'deadline_s'.*Rename"):
        WorkerGroup(Greedy())


def test_a_subclass_inherits_registered_methods():
    class More(Counter):
        @register(dispatch_mode=Dispatch.RANK_ZERO)
        def more(self) -> int:
            return 1

    group = WorkerGroup(More(0))
    assert group.more() == 1
    assert group.tell_first("hello") == "0: hello"


def test_a_custom_mode_in_verls_form():
    """Keep the answer of the last rank, and pass every rank its number with the argument."""

    def dispatch(worker_group, *args, **kwargs):
        return [[value] * worker_group.world_size for value in args], {
            "number": list(range(worker_group.world_size))
        }

    register_dispatch_mode(
        "last_rank", dispatch, lambda worker_group, output: output[worker_group.world_size - 1]
    )
    with pytest.raises(ConfigError, match="exists already"):
        register_dispatch_mode("last_rank", dispatch, dispatch)
    with pytest.raises(ConfigError, match="Unknown dispatch mode 'nobody'"):
        find_dispatch_mode("nobody")

    class Last(Counter):
        @register(dispatch_mode=Dispatch.LAST_RANK)  # pyright: ignore[reportAttributeAccessIssue]
        def which(self, word: str, number: int | None = None) -> str:
            return f"{word} {number}"

    assert several(3, Last).which("rank") == "rank 2"
    update_dispatch_mode("last_rank", dispatch, lambda worker_group, output: output)
    assert several(2, Last).which("rank") == ["rank 0", "rank 1"]


@given(sizes, some_lengths)
def test_predefined_functions_invert_their_own_split(size, lengths):
    pair = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO)
    group = several(size)
    batch = with_lengths(lengths)
    (batches, word), named = pair["dispatch_fn"](group, batch, "a", flag=True)
    assert word == ["a"] * size
    assert named == {"flag": [True] * size}
    assert pair["collect_fn"](group, batches).batch["x"].tolist() == batch.batch["x"].tolist()


def test_a_worker_knows_its_rank(monkeypatch):
    def place(worker: Worker) -> tuple[int, ...]:
        return worker.rank, worker.world_size, worker.data_rank, worker.data_size

    assert place(Worker()) == (0, 1, 0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert place(Worker()) == (3, 8, 3, 8)
    assert place(Other(same_share_for_all=True)) == (3, 8, 0, 1)


def test_object_columns_travel_with_their_rows():
    class Namer(Counter):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def names(self, batch: DataProto) -> DataProto:
            return DataProto.from_dict(
                tensors={}, non_tensors={"name": np.array(batch.non_tensor_batch["name"])}
            )

    for batch in (rows(4), with_lengths([9, 1, 5, 2])):
        answer = several(3, Namer).names(batch)
        assert list(answer.non_tensor_batch["name"]) == ["row 0", "row 1", "row 2", "row 3"]


def test_work_with_effects_is_done_once_for_each_row():
    """Expect ranks without rows, where other modes repeat rows to give each rank one."""

    class Plays(Counter):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_ANY_ROWS)
        def play(self, batch: DataProto) -> DataProto:
            self.seen.append(batch.batch["x"].tolist())
            return batch.select_idxs(np.repeat(np.arange(len(batch)), 2))

    group = several(3, Plays)
    answer = group.play(rows(2))
    assert sorted(answer.batch["x"].tolist()) == [0, 0, 1, 1]
    assert sorted(worker.seen[0] for worker in workers_of(group)) == [[], [0], [1]]


def test_a_batch_without_rows_crosses_processes_that_keep_no_strides():
    """Ray gives back a buffer of no bytes as an array with the stride 0."""
    empty = DataProto.from_dict({"a": torch.zeros(0, 3)})
    raw, dtype, shape = pack_tensor(empty.batch["a"])
    without = np.lib.stride_tricks.as_strided(raw, shape=(0,), strides=(0,))
    assert unpack_tensor((without, dtype, shape)).shape == (0, 3)


def test_arguments_that_are_no_lists_go_to_all_ranks():
    split = MODES[Dispatch.ALL_TO_ALL].split
    assert split(2, ("a/path",), {"b": 3}) == ([(("a/path",), {"b": 3})] * 2, None)
    assert split(2, (["a", "b"],), {}) == ([(("a",), {}), (("b",), {})], None)
    with pytest.raises(ValueError, match="one entry per rank"):
        MODES[Dispatch.DP_COMPUTE].split(2, ("ab",), {})


def test_the_text_of_an_execute_mode_is_the_mode():
    @register(Dispatch.ONE_TO_ALL, execute_mode="rank_zero")  # pyright: ignore
    def method(worker: object) -> None: ...

    assert getattr(method, CALL_PLAN)["execute_mode"] is Execute.RANK_ZERO
    with pytest.raises(ConfigError, match="execute_mode must be one of"):
        register(Dispatch.ONE_TO_ALL, execute_mode="first")  # pyright: ignore


def test_answers_that_cannot_be_joined_are_named():
    join = MODES[Dispatch.DP_COMPUTE_PROTO].collect
    with pytest.raises(TypeError, match="must return a DataProto on every rank, got NoneType"):
        join([None, None], None)


def test_rows_may_be_chosen_by_a_reversed_array():
    batch = DataProto.from_dict({"a": torch.arange(4)})
    batch.reorder(np.arange(4)[::-1])  # pyright: ignore
    assert batch.batch["a"].tolist() == [3, 2, 1, 0]


class OnMeshes(Worker):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        places = {0: (0, True), 1: (0, False), 2: (1, True)}
        self._register_dispatch_collect_info("actor", *places[number])
        self._register_dispatch_collect_info("silent", number, is_collect=number > 0)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def train(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({**data.batch, "by": torch.full((len(data),), self.number)})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="silent"))
    def never(self, data: DataProto) -> DataProto:
        return data


class OnNoMesh(Worker):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    train = OnMeshes.train


def test_batches_are_dealt_to_the_shares_of_a_mesh():
    batch = DataProto.from_dict({"row": torch.arange(4)})
    answer = several(3, OnMeshes).train(batch)
    assert answer.batch["row"].tolist() == [0, 1, 2, 3]
    assert answer.batch["by"].tolist() == [0, 0, 2, 2], "rank 1 works on the rows of rank 0"

    by_data_rank = several(3, OnNoMesh, data_ranks=[0, 1, 1]).train(batch)
    assert by_data_rank.batch["by"].tolist() == [0, 0, 1, 1]

    with pytest.raises(ConfigError, match=r"mesh 'silent' every dp_rank .* needs a rank with is_c"):
        several(3, OnMeshes).never(batch)
    with pytest.raises(ConfigError, match="mesh 'actor' is registered already"):
        OnMeshes(0)._register_dispatch_collect_info("actor", 0, True)
    with pytest.raises(ConfigError, match="OnMeshes has no mesh 'other', only actor, silent"):
        OnMeshes(0).mesh_place("other")
