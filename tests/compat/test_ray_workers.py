"""Groups of Ray actors in recipes of verl 0.5: decorated and fused workers, calls, padding."""

import asyncio
import os
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray", reason="the optional backend is not installed")
import ray
import torch

from verl.protocol import DataProto
from verl.single_controller.data_future import DataProtoFuture
from verl.single_controller.ray import connect
from verl.utils.errors import ConfigError, WorkerError, WorkerLostError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from verl.single_controller.base import Worker  # pyright: ignore[reportMissingImports]
    from verl.single_controller.base.decorator import (  # pyright: ignore[reportMissingImports]
        Dispatch,
        make_nd_compute_dataproto_dispatch_fn,
        register,
    )
    from verl.single_controller.ray.base import (  # pyright: ignore[reportMissingImports]
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        create_colocated_worker_cls,
        create_colocated_worker_cls_fused,
        create_colocated_worker_raw_cls,
        merge_resource_pool,
        split_resource_pool,
    )

# Starting the cluster takes most of the time.
pytestmark = pytest.mark.slow


@ray.remote
class Actor(Worker):
    def __init__(self) -> None:
        super().__init__()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x):
        return x + self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add_rank(self, data: DataProto) -> DataProto:
        data.batch["a"] += self.rank
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    async def add_rank_later(self, data: DataProto) -> DataProto:
        await asyncio.sleep(0)
        data.batch["a"] = data.batch["a"] + self.rank
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def add_later(self, x):
        if x is None:
            raise ValueError("no number")
        return x + self.rank

    def getenv(self, key):
        return os.environ.get(key)


@ray.remote
class Critic(Worker):
    def __init__(self, val) -> None:
        super().__init__()
        self.val = val

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def sub(self, x):
        return x - self.val


@ray.remote
class Meshed(Worker):
    """Both ranks work on the same rows in training, and on rows of their own in the rollout."""

    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("actor", dp_rank=0, is_collect=self.rank == 1)
        self._register_dispatch_collect_info("rollout", dp_rank=1 - self.rank, is_collect=True)

    def _marked(self, data):
        data.batch["rank"] = torch.full((len(data),), self.rank)
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def train(self, data):
        return self._marked(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout"))
    def generate(self, data):
        return self._marked(data)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="judge"))
    def judge(self, data):
        return data


CLASSES = {"actor": RayClassWithInitArgs(Actor), "critic": RayClassWithInitArgs(cls=Critic, val=10)}


@ray.remote
class Both(create_colocated_worker_raw_cls(CLASSES)):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add_and_sub(self, x):
        return self.critic.sub(self.actor.add(x))


@pytest.fixture(scope="module")
def pool():
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    connect(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=6)
    yield pool
    pool.shutdown()
    ray.shutdown()
    del os.environ["PYTHONPATH"]


@pytest.fixture(scope="module")
def actors(pool):
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(cls=Actor))


def test_methods_are_called_by_name(actors):
    sizes = actors.execute_all_sync("getenv", key="RAY_LOCAL_WORLD_SIZE")
    assert sizes == ["2", "2"]
    assert set(actors.execute_all_sync("getenv", key="RAY_LOCAL_RANK")) == {"0", "1"}
    assert actors.execute_all_sync("add", [10, 20]) == [10, 21], "a list with an entry each"
    assert actors.execute_all_sync("add", 10) == [10, 11]
    assert actors.execute_rank_zero_sync("add", 10) == 10


@pytest.mark.parametrize("rows", [1, 3, 4, 7])
def test_batch_of_any_size_is_returned_complete(actors, rows):
    names = np.array([f"row {row}" for row in range(rows)], dtype=object)
    data = DataProto.from_dict({"a": torch.zeros(rows)}, {"na": names}, auto_padding=True)
    output = actors.add_rank(data)
    assert output.non_tensor_batch["na"].tolist() == names.tolist()
    expected = torch.arange(2).repeat_interleave((rows + 1) // 2)[:rows]
    assert output.batch["a"].tolist() == expected.tolist()


def test_async_method_returns_a_future_of_a_batch(actors):
    future = actors.add_rank_later(DataProto.from_dict({"a": torch.zeros(4)}))
    assert isinstance(future, DataProtoFuture)
    assert future.get().batch["a"].tolist() == [0, 0, 1, 1]
    assert [part.get().batch["a"].tolist() for part in future.chunk(2)] == [[0, 0], [1, 1]]


def test_fused_workers(pool):
    fused = RayWorkerGroup(pool, RayClassWithInitArgs(cls=Both))
    fused.fuse(CLASSES.keys())
    x = fused.actor.add(torch.tensor(0.1))
    assert fused.critic.sub(x) == [torch.tensor(0.1) - 10, torch.tensor(1.1) - 10]
    assert fused.add_and_sub(0.1) == [0.1 - 10, 0.1 + 1 - 10]


def test_separately_fused_classes(pool):
    fused = RayWorkerGroup(pool, create_colocated_worker_cls_fused(CLASSES))
    fused.fuse(["actor"])
    assert fused.actor.add(1) == [1, 2]

    groups = fused.spawn_fused(["actor", "critic"])
    assert list(groups) == ["actor", "critic"]
    assert groups["actor"].world_size == 2
    assert groups["actor"].add(5) == [5, 6]
    assert groups["critic"].sub([11, 12]) == [1, 2]
    with pytest.raises(ConfigError, match="no fused role 'judge'"):
        fused.spawn_fused(["judge"])


def test_functions_run_on_the_ranks(actors):
    data = DataProto.from_dict({"a": torch.zeros(4)})
    output = actors.execute_with_func_generator(lambda worker, data: worker.add_rank(data), data)
    assert output.batch["a"].tolist() == [0, 0, 1, 1]
    assert actors.execute_func_rank_zero(lambda x: (x, os.environ["RANK"]), 7) == (7, "0")


def test_ray_waits_for_calls_that_do_not_block(actors):
    references = actors.add_later(10)
    assert len(references) == 2
    assert ray.get(references) == [10, 11]
    assert ray.get(references[1]) == 11
    assert references.get() == [10, 11], "as often as one likes"
    done, left = ray.wait(actors.execute_all_async("add", 1), num_returns=2)
    assert (len(done), left) == (2, [])

    failed = actors.add_later(None)
    with pytest.raises(WorkerError, match="ValueError: no number"):
        ray.get(failed)
    with pytest.raises(WorkerError, match=r"add_later raised on rank 0, 1 .*ValueError: no number"):
        failed.get()
    assert actors.add(1) == [1, 2]


def test_one_worker_is_called_as_an_actor_of_ray(actors):
    first, second = actors.workers
    assert ray.get([first.add.remote(5), second.add.remote(x=6)]) == [5, 7]
    assert ray.get(second.getenv.remote("RANK")) == "1", "it is not registered"
    with pytest.raises(WorkerError, match="no attribute 'absent'"):
        ray.get(first.absent.remote())


def test_groups_of_colocated_classes_offer_the_calls_of_a_group_of_ray(pool):
    both = RayWorkerGroup(pool, create_colocated_worker_cls(CLASSES))
    groups = both.spawn(["actor", "critic"])
    assert groups["actor"].execute_all_sync("add", 1) == [1, 2]
    assert ray.get(groups["critic"].workers[0].sub.remote(12)) == 2


def test_batches_are_dealt_to_the_shares_of_a_mesh(pool):
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Meshed))
    data = DataProto.from_dict({"a": torch.arange(4)})
    trained = group.train(data)
    assert trained.batch["a"].tolist() == [0, 1, 2, 3]
    assert trained.batch["rank"].tolist() == [1] * 4, "rank 1 answers for all rows"
    generated = group.generate(data)
    assert generated.batch["a"].tolist() == [0, 1, 2, 3]
    assert generated.batch["rank"].tolist() == [1, 1, 0, 0]
    with pytest.raises(WorkerError, match="Meshed has no mesh 'judge', only actor, rollout"):
        group.judge(data)


def test_pools_are_split_and_merged(pool):
    first, second = split_resource_pool(pool, 1)
    assert [first.world_size, second.world_size] == [1, 1]
    groups = [RayWorkerGroup(part, RayClassWithInitArgs(Actor)) for part in (first, second)]
    assert [group.execute_all_sync("getenv", "WORLD_SIZE") for group in groups] == [["1"], ["1"]]

    merged = merge_resource_pool(second, first)
    assert merged.world_size == 2
    assert merged.process_on_nodes == [1, 1]
    assert merged.bundles() == list(reversed(pool.bundles()))
    second.shutdown()
    assert groups[0].add(1) == [1]
    with pytest.raises(WorkerLostError, match="shut down"):
        groups[1].add(1)

    for sizes in (3, 0, [1, 2], []):
        with pytest.raises(ConfigError, match="split_size must divide the 2 processes"):
            split_resource_pool(pool, sizes)
    with pytest.raises(ConfigError, match="must have the same use_gpu, got False and True"):
        merge_resource_pool(pool, RayResourcePool([2]))
