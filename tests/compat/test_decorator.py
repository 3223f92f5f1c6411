"""`register` and its companions as recipes of verl 0.5 use them, and the helpers of a worker."""

import functools
import socket
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller import WorkerGroup
from verl.single_controller.data_future import DataProtoFuture
from verl.single_controller.dispatch import functions_of, mode_of_functions, registered_methods
from verl.utils.errors import BatchError, ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from verl.single_controller.base import Worker, decorator  # pyright: ignore
    from verl.single_controller.base.decorator import Dispatch, Execute, register  # pyright: ignore

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def plans_of(worker_class: Any) -> dict[str, Any]:
    return registered_methods(worker_class)


def batch_of(rows: int, auto_padding: bool = False) -> DataProto:
    names = [f"row {row}" for row in range(rows)]
    return DataProto.from_dict(
        {"a": torch.arange(rows)}, {"name": names}, auto_padding=auto_padding
    )


def halve(worker_group, *args, **kwargs):
    """Dispatch half of each number to every rank."""
    size = worker_group.world_size
    columns = tuple([value / 2] * size for value in args)
    return columns, {name: [value / 2] * size for name, value in kwargs.items()}


def total(worker_group, output):
    return sum(output) + worker_group.world_size * 100


class Adder(Worker):
    @register(dispatch_mode={"dispatch_fn": halve, "collect_fn": total})
    def add(self, x, y):
        return x + y

    @register(Dispatch.DP_COMPUTE_PROTO, Execute.ALL, blocking=False)
    def later(self, data):
        return data

    @register(Dispatch.ONE_TO_ALL, materialize_futures=False)
    def kind_of(self, value):
        return type(value).__name__


# ---- register ------------------------------------------------------------------------------------


def test_pair_of_functions_is_a_dispatch_mode():
    assert WorkerGroup(Adder()).add(6, y=10) == 3 + 5 + 100


def test_pair_of_functions_splits_for_every_rank():
    mode = plans_of(Adder)["add"].dispatch_mode
    assert isinstance(mode, dict)
    per_rank, group = mode_of_functions(**mode).split(2, (8,), {"y": 4})
    assert per_rank == [((4.0,), {"y": 2.0})] * 2
    assert mode["collect_fn"](group, [1, 2]) == 203


def test_own_functions_may_use_those_of_verl():
    group = SimpleNamespace(world_size=2)
    columns, _ = decorator.dispatch_dp_compute_data_proto(group, batch_of(4))
    answers = list(reversed(columns[0]))
    rows = decorator.collect_dp_compute_data_proto(group, columns[0]).batch["a"]
    assert rows.tolist() == [0, 1, 2, 3]
    other = SimpleNamespace(world_size=2)  # whose arguments another function has split
    rows = decorator.collect_dp_compute_data_proto(other, answers).batch["a"]
    assert rows.tolist() == [2, 3, 0, 1]
    assert decorator.dispatch_dp_compute(group, [1, 2], x=[3, 4]) == (([1, 2],), {"x": [3, 4]})
    assert decorator.collect_dp_compute(group, [5, 6]) == [5, 6]


def test_incomplete_pair_is_rejected():
    class Half(Worker):
        @register(dispatch_mode={"dispatch_fn": halve})
        def method(self):
            return 1

    with pytest.raises(ConfigError, match=r"Add \['collect_fn'\]"):
        WorkerGroup(Half())


def test_register_stores_its_arguments_on_the_method():
    assert getattr(Adder.later, decorator.MAGIC_ATTR) == {
        "dispatch_mode": Dispatch.DP_COMPUTE_PROTO,
        "execute_mode": Execute.ALL,
        "blocking": False,
    }
    assert not hasattr(Adder.__init__, decorator.MAGIC_ATTR)


def test_wrapper_with_the_attribute_is_registered():
    def wrapped(self, x, y):
        return Adder.add(self, x, y) * 1000

    setattr(wrapped, decorator.MAGIC_ATTR, getattr(Adder.add, decorator.MAGIC_ATTR))
    wrapping: Any = type("Wrapping", (Adder,), {"add": wrapped})
    assert WorkerGroup(wrapping()).add(6, 10) == 8000 + 100


def test_materialize_futures_is_kept():
    plans = plans_of(Adder)
    assert plans["later"].materialize_futures
    assert not plans["kind_of"].materialize_futures
    future = WorkerGroup(Adder()).later(batch_of(2))
    assert WorkerGroup(Adder()).kind_of(future) != ["DataProto"]


def test_predefined_pair_is_a_dispatch_mode():
    pair = decorator.get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO)
    assert functions_of(mode_of_functions(**pair)) == (pair["dispatch_fn"], pair["collect_fn"])


# ---- splitting arguments -------------------------------------------------------------------------


def test_batches_are_split_into_chunks():
    args, kwargs = decorator._split_args_kwargs_data_proto(2, batch_of(4), other=batch_of(2))
    assert [part.batch["a"].tolist() for part in args[0]] == [[0, 1], [2, 3]]
    assert [part.non_tensor_batch["name"].tolist() for part in kwargs["other"]] == [
        ["row 0"],
        ["row 1"],
    ]


def test_only_batches_are_split():
    with pytest.raises(AssertionError, match="got int"):
        decorator._split_args_kwargs_data_proto(2, batch_of(4), 3)
    with pytest.raises(AssertionError, match="5 rows and 2 chunks"):
        decorator._split_args_kwargs_data_proto(2, batch_of(5))


def test_chunks_of_a_future_are_futures():
    future = DataProtoFuture.concat([WorkerGroup(Adder()).later(batch_of(4))])
    ((first, second),), _ = decorator._split_args_kwargs_data_proto(2, future)
    assert isinstance(first, DataProtoFuture)
    assert second.get().batch["a"].tolist() == [2, 3]


@pytest.mark.parametrize(("rows", "added"), [(1, 2), (3, 0), (4, 2), (7, 2)])
def test_padding_makes_equal_chunks_and_reports_added_rows(rows, added):
    split = decorator._split_args_kwargs_data_proto_with_auto_padding
    args, kwargs = split(3, batch_of(rows, True), data=batch_of(rows, True))
    assert kwargs.pop(decorator._padding_size_key) == added
    for parts in (args[0], kwargs["data"]):
        assert {len(part) for part in parts} == {(rows + added) // 3}
        joined = DataProto.concat(parts)
        assert joined.batch["a"][:rows].tolist() == list(range(rows))
        assert joined.non_tensor_batch["name"][rows:].tolist() == [
            f"row {row % rows}" for row in range(added)
        ]


def test_batches_without_padding_are_split_unchanged():
    split = decorator._split_args_kwargs_data_proto_with_auto_padding
    args, kwargs = split(2, batch_of(4))
    assert [len(part) for part in args[0]] == [2, 2]
    assert kwargs == {}
    with pytest.raises(BatchError, match="5 rows"):
        split(2, batch_of(5))
    with pytest.raises(BatchError, match="got 3 and 4"):
        split(2, batch_of(3, True), batch_of(4, True))


def test_futures_become_batches():
    future = DataProtoFuture.concat([WorkerGroup(Adder()).later(batch_of(2))])
    args, kwargs = decorator._materialize_futures(3, future, named=future, other="text")
    assert args[0] == 3
    assert isinstance(args, tuple)
    for batch in (args[1], kwargs["named"]):
        assert isinstance(batch, DataProto)
        assert batch.batch["a"].tolist() == [0, 1]
    assert kwargs["other"] == "text"


# ---- helpers of a worker -------------------------------------------------------------------------


def test_a_worker_reads_its_environment(monkeypatch):
    values = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    worker = Worker()
    assert worker.rank == 3
    assert worker.world_size == 8
    assert worker.get_master_addr_port() == ("10.0.0.7", "29500")
    assert worker.get_cuda_visible_devices() == "1,2"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert worker.get_cuda_visible_devices() == "not set"


def test_server_can_listen_at_the_worker_address():
    address, port = Worker().get_availale_master_addr_port()
    with socket.create_server((address, int(port))) as server:
        assert server.getsockname() == (address, int(port))
    assert 0 < Worker()._get_free_port() < 65536


def test_address_without_a_network_is_loopback(monkeypatch):
    def refuse(self, address):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "socket", type("Offline", (socket.socket,), {"connect": refuse}))
    assert Worker()._get_node_ip() == "127.0.0.1"


def add_rank(worker: Worker, data: DataProto, step: int) -> DataProto:
    data.batch["a"] = data.batch["a"] + worker.rank + step
    return data


def test_any_function_runs_on_a_group():
    group = WorkerGroup(Adder())
    result = group.execute_with_func_generator(add_rank, batch_of(3), step=10)
    assert result.batch["a"].tolist() == [10, 11, 12]
    assert group.execute_func_rank_zero(functools.partial(np.add, 2), 3) == 5


def test_verls_own_functions_make_a_mode():
    mode = {
        "dispatch_fn": decorator.dispatch_one_to_all,
        "collect_fn": decorator.collect_all_to_all,
    }

    class Adder(Worker):
        @register(dispatch_mode=mode)
        def add(self, x, y=0):
            return x + y

    assert WorkerGroup(Adder()).add(1, y=2) == [3]
    lists = decorator.dispatch_all_to_all(None, [1], y=[2])
    assert lists == (([1],), {"y": [2]})
