"""Two GPUs over NCCL give the results of one GPU. Starts its own two ranks: run it with plain
pytest.

`pytest -m multi_gpu tests/gpu/test_multi_gpu.py` on a machine with two devices.
"""

from pathlib import Path

import pytest
import torch

from tests.distributed import jobs
from tests.distributed.jobs import WHOLE, Setup
from tests.distributed.ranks import Ranks
from tests.tiny_models import save_tiny
from verl.engine.microbatch import TokenBudget
from verl.models.load import load_causal_lm

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(300)]

SHAPES = [(9, 12), (4, 30), (25, 7), (40, 41), (3, 5), (17, 22)]
ALL_ROWS = ((0, 1, 2, 3, 4, 5),)
UNEVEN = ((0, 1, 2, 3, 5), (4,))
EXACT = Setup(double=False, device="cuda", compute_dtype="float32")
ROUNDED = Setup(double=False, device="cuda")
OFFLOAD = {"checkpointing": True, "activation_offload": True, "param_offload": True}
SETTINGS = [
    {},
    {"fsdp_size": 1},
    {"sequence": 2},
    {"sequence": 2, **OFFLOAD},
    {"offload_policy": True},
    {"sequence": 2, "checkpointing": True, "compiles": True},
]
IDS = ["fsdp", "hsdp", "ulysses", "ulysses, offload", "offload policy", "ulysses, compiled"]


def with_(setup: Setup, settings: dict) -> Setup:
    return Setup(**{**vars(setup), **settings})


def relative_l2(one: dict, other: dict) -> float:
    difference = sum((one[name] - other[name]).square().sum() for name in other)
    return (difference / sum(value.square().sum() for value in other.values())).sqrt().item()


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
@pytest.mark.parametrize(
    ("setup", "tolerance"), [(EXACT, 1e-4), (ROUNDED, 0.03)], ids=["fp32", "bf16"]
)
def test_two_gpus_give_the_gradient_of_one(
    two_gpus: Ranks, settings: dict, setup: Setup, tolerance: float
):
    deal = ALL_ROWS if "sequence" in settings else UNEVEN
    expected = jobs.gradient(setup, SHAPES, ALL_ROWS, WHOLE)
    for found in two_gpus.call(
        jobs.gradient, with_(setup, settings), SHAPES, deal, TokenBudget(rows=2)
    ):
        assert relative_l2(found["gradient"], expected["gradient"]) <= tolerance
        assert found["norm"] == pytest.approx(expected["norm"], rel=tolerance)
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("settings", SETTINGS[:4], ids=IDS[:4])
def test_two_gpus_train_like_one(two_gpus: Ranks, settings: dict):
    deal = ALL_ROWS if "sequence" in settings else UNEVEN
    expected = jobs.train(EXACT, SHAPES, ALL_ROWS, WHOLE, 3)
    for found in two_gpus.call(jobs.train, with_(EXACT, settings), SHAPES, deal, WHOLE, 3):
        assert found["log"] == [pytest.approx(line, rel=1e-2) for line in expected["log"]]


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_second_gpu_has_the_weights_that_the_first_rank_read(
    two_gpus: Ranks, tmp_path: Path, lora_rank: int
):
    save_tiny(tmp_path, tie_word_embeddings=True)
    first, second = two_gpus.call(
        jobs.weights_that_were_read, tmp_path, "bfloat16", lora_rank, "cuda"
    )
    expected = dict(load_causal_lm(tmp_path, dtype="bfloat16").named_parameters())
    assert first.keys() == second.keys()
    for name, value in second.items():
        torch.testing.assert_close(value, first[name], rtol=0, atol=0)
        if name in expected:
            torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=0)
    assert lora_rank or expected.keys() <= second.keys()


def test_a_spoilt_row_is_named_on_both_gpus(two_gpus: Ranks):
    for found in two_gpus.call(jobs.spoilt_step, ROUNDED, SHAPES, ((0, 1, 2), (3, 4, 5)), 4):
        assert found["spoilt"].offenders == ["row 1 (uid prompt-2) of data-parallel rank 1"]
        assert found["unchanged"]
        assert not found["next"].skipped


def test_a_checkpoint_of_two_gpus_is_one_of_one(two_gpus: Ranks, tmp_path):
    saved = two_gpus.call(jobs.save, EXACT, tmp_path, SHAPES, UNEVEN)[1]
    loaded = jobs.load(EXACT, tmp_path, SHAPES, ALL_ROWS)
    assert all(
        torch.equal(loaded["parameters"][name].cpu(), value.cpu())
        for name, value in saved["parameters"].items()
    )
    assert all(
        torch.equal(one.cpu(), other.cpu())
        for one, other in zip(loaded["moments"], saved["moments"], strict=True)
    )
