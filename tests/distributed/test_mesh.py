"""Groups of ranks, and errors for sizes that do not fit."""

import pytest
import torch
from torch.distributed.tensor import Shard, debug, distribute_tensor

from verl.distributed.collectives import ALONE, all_reduce_sum, gather_objects, max_of, sum_of
from verl.distributed.mesh import close_process_group, init_mesh
from verl.utils.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def process_group():
    close_process_group()  # a group from another test file
    yield
    close_process_group()


def test_unsharded_process_starts_no_process_group():
    mesh = init_mesh(CPU, shard=False)
    assert (mesh.weights, mesh.world, mesh.data, mesh.sequence) == (None, ALONE, ALONE, ALONE)
    assert not torch.distributed.is_initialized()


def test_mesh_of_one_needs_no_environment_variables():
    mesh = init_mesh(CPU)
    assert mesh.weights is not None
    assert mesh.weights.shape == (1,)
    assert init_mesh(CPU) is mesh, "engines of one process share their groups"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"sequence_parallel_size": 4},
            "ulysses_sequence_parallel_size.* got 4 and 6. Set it to one of 1, 2, 3, 6",
        ),
        ({"fsdp_size": 4}, "fsdp_size must divide.* got 4 and 6. .*-1 for all"),
        ({}, "WORLD_SIZE=6 .*RANK and MASTER_ADDR and MASTER_PORT.*torchrun"),
    ],
)
def test_mismatched_sizes_are_errors(monkeypatch, sizes, message):
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ConfigError, match=message):
        init_mesh(CPU, **sizes)


def test_collectives_of_a_single_rank_return_their_input():
    values = torch.tensor([1.0, 2.0])
    assert all_reduce_sum(values, ALONE) is values
    assert (sum_of(3, ALONE), max_of(-3, ALONE), gather_objects("a", ALONE)) == (3, -3, ["a"])


def test_no_cached_operation_keeps_a_closed_mesh():
    mesh = init_mesh(CPU)
    sharded = distribute_tensor(torch.ones(4), mesh.weights, [Shard(0)])
    assert (sharded + 1).full_tensor().tolist() == [2.0] * 4
    assert debug._get_fast_path_sharding_prop_cache_stats() != (0, 0)
    close_process_group()
    assert debug._get_fast_path_sharding_prop_cache_stats() == (0, 0)
