"""Shards of two ranks are gathered in buckets into the weights of one process, and verified where
an engine has halves."""

import pytest
import torch

from tests.distributed.jobs import Setup
from tests.distributed.ranks import Ranks
from tests.weight_sync import jobs
from verl.weight_sync.fingerprint import fingerprints
from verl.weight_sync.shards import _buckets

PLAIN = Setup(double=False)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fsdp_size": 1},
        {"param_offload": True},
        {"offload_policy": True},
        {"lora": True},
        {"family": "gemma2"},
    ],
    ids=["fsdp", "hsdp", "param offload", "offload policy", "lora", "tied"],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as it is", "bf16"])
def test_two_ranks_hand_over_the_weights_of_one(
    two_ranks: Ranks, settings: dict, dtype: torch.dtype | None
):
    alone = Setup(double=False, lora="lora" in settings, family=settings.get("family", "qwen2"))
    expected, _ = jobs.gather_model(alone, None, 1 << 20)
    expected = {name: tensor.to(dtype or tensor.dtype) for name, tensor in expected.items()}
    values = fingerprints(list(expected.values())).tolist()
    found = two_ranks.call(jobs.gather_model, Setup(double=False, **settings), dtype, 7000)
    for tensors, log in found:
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor.to(dtype or tensor.dtype), expected[name]), name
        assert log == dict(zip(expected, values))
    if dtype is not None and not settings:
        assert {tensor.dtype for tensor in found[0][0].values()} == {dtype}, (
            "travelled wider than needed"
        )


def test_rows_that_the_ranks_do_not_divide(two_ranks: Ranks):
    expected = {
        name: value.detach().to(torch.bfloat16)
        for name, value in jobs.odd_rows().named_parameters()
    }
    for tensors, log in two_ranks.call(jobs.gather_odd_rows):
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
        assert log == dict(zip(expected, fingerprints(list(expected.values())).tolist()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_that_fit_are_gathered_in_place(two_ranks: Ranks, dtype: torch.dtype):
    expected = {
        name: value.detach().to(torch.bfloat16)
        for name, value in jobs.odd_rows().named_parameters()
    }
    places = {
        name: torch.full(value.shape, torch.nan, dtype=dtype) for name, value in expected.items()
    }
    places["4"] = torch.full((6, 4), torch.nan, dtype=dtype)
    for tensors, placed in two_ranks.call(jobs.gather_to_places, places):
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
        assert torch.isfinite(tensors["4"]).all()
        assert placed == (["4"] if dtype == torch.bfloat16 else [])


@pytest.mark.parametrize("halves", [False, True])
def test_verification_accepts_sound_engines(two_ranks: Ranks, halves: bool):
    assert two_ranks.call(jobs.hand_over, None, halves) == [(True, "")] * 2


@pytest.mark.parametrize(("halves", "ranks"), [(False, "1"), (True, "0, 1")])
def test_damage_on_one_rank_is_named_on_both(two_ranks: Ranks, halves: bool, ranks: str):
    for _, error in two_ranks.call(jobs.hand_over, 1, halves):
        assert f"'model.layers.0.mlp.experts.gate_up_proj' on rank {ranks}." in error


def test_a_bucket_exceeds_its_size_only_for_a_larger_tensor():
    tensors = {
        f"{number}": torch.zeros(size)
        for number, size in enumerate([10, 10, 30, 5, 5, 5, 200, 1, 24])
    }
    tensors["other"] = torch.zeros(1, dtype=torch.float64)
    sizes = [
        (bucket.names, bucket.num_bytes) for bucket in _buckets(tensors.items(), 100, torch.float32)
    ]

    assert sizes == [
        (["0", "1"], 80),
        (["2"], 120),
        (["3", "4", "5"], 60),
        (["6"], 800),
        (["7", "8"], 100),
        (["other"], 4),
    ]
