"""The batch-invariant product and sum of CUDA, in Triton's interpreter."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rollout.interpreter import interpreted


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sums_by_place() -> bool:
    """Check whether numpy, which computes the interpreter's products, sums a row by its position on
    this CPU (only with AVX2)."""
    row = random(1, 64).numpy()
    other = random(64, 64, seed=1).numpy()
    product = np.matmul(np.repeat(row, 64, axis=0), other)
    return bool((product != product[:1]).any())


@interpreted
@pytest.mark.skipif(
    sums_by_place(), reason="numpy's products depend on the place of a row on this CPU"
)
def test_a_row_of_a_product_has_the_same_bits_in_every_batch() -> None:
    from verl.rollout.embedded.kernels import linear as kernels

    for dtype, inner in ((torch.float16, 1100), (torch.float32, 40)):
        x = random(70, inner, dtype=dtype)
        weight = random(72, inner, seed=1).to(dtype)
        bias = random(72).to(dtype)
        expected = F.linear(x.double(), weight.double(), bias.double())
        whole = kernels.linear(x, weight, bias)
        assert (whole.double() - expected).norm() <= 1e-3 * expected.norm()
        for start, stop in ((0, 1), (69, 70), (3, 40)):
            assert torch.equal(kernels.linear(x[start:stop], weight, bias), whole[start:stop])
        wide = torch.full((70, 2 * inner + 3), float("nan"), dtype=dtype)
        wide[:, 3 : 3 + inner] = x
        transposed = weight.t().contiguous().t()
        assert torch.equal(kernels.linear(wide[:, 3 : 3 + inner], transposed, bias), whole)
        out = torch.full((70, 80), 5.0)
        assert kernels.linear(x, weight, out=out[:, 4:76]).dtype == torch.float32
        assert (out[:, 4:76].double() + bias.double() - expected).norm() <= 1e-3 * expected.norm()
        assert bool((out[:, :4] == 5).all() and (out[:, 76:] == 5).all())
    assert kernels.linear(random(0, 40), random(8, 40)).shape == (0, 8)


@interpreted
def test_the_location_of_partial_products_changes_no_bit() -> None:
    """Compute the splits of K in different places; how K is split depends only on the weight."""
    from verl.rollout.embedded.kernels import linear as kernels

    x = random(70, 1700)
    weight = random(72, 1700, seed=1)
    bias = random(72)
    plan = kernels.plan(70, 72, 1700, torch.float32)
    assert (plan.splits, plan.in_grid) == (4, True)
    results = []
    for in_grid in (True, False):
        results.append(torch.empty(70, 72))
        kernels._launch(x, weight, bias, results[-1], plan._replace(in_grid=in_grid))
    assert torch.equal(*results)
    for columns, inner in (
        (1536, 1536),
        (2048, 1536),
        (1536, 8960),
        (17920, 1536),
        (151936, 896),
        (40, 24),
    ):
        for dtype in kernels.DTYPES:
            plans = [
                kernels.plan(rows, columns, inner, dtype) for rows in (1, 64, 65, 256, 1024, 8192)
            ]
            assert len({(plan.splits, plan.split_k) for plan in plans}) == 1
            assert all(
                (plan.splits - 1) * plan.split_k < inner <= plan.splits * plan.split_k
                for plan in plans
            )
            assert all(plan.split_k % plan.tile.k == 0 for plan in plans)


@interpreted
def test_a_row_is_summed_independently() -> None:
    from verl.rollout.embedded.kernels import linear as kernels

    for columns in (1, 40, 5000):
        x = random(3, 2, columns)
        torch.testing.assert_close(kernels.row_sum(x), x.sum(-1), rtol=1e-4, atol=1e-4)
        assert torch.equal(kernels.row_sum(x[1:2]), kernels.row_sum(x)[1:2])
