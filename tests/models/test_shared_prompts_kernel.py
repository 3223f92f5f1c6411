"""The kernel that averages two attentions, interpreted on the CPU and compared with plain
operations."""

import pytest
import torch

from tests.rollout.interpreter import interpreted
from verl.models.kernels.shared_prompts import merge_
from verl.models.shared_prompts import _merge_


@pytest.mark.parametrize(("heads", "dim"), [(3, 8), (4, 24)])
@interpreted
def test_the_kernel_gives_the_result_of_plain_operations(heads: int, dim: int):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(7, heads, dim, generator=generator)
    whole_lse = 3 * torch.randn(heads, 7, generator=generator)
    # Slices of larger tensors, like the responses of a batch.
    out = whole[2:]
    lse = whole_lse[:, 2:]
    other = torch.randn(5, heads, dim, generator=generator)
    other_lse = torch.randn(heads, 5, generator=generator)
    expected = whole.clone()[2:]

    expected_lse = whole_lse.clone()[:, 2:]
    _merge_(expected, expected_lse, other, other_lse)
    before = whole[:2].clone(), whole_lse[:, :2].clone()
    merge_(out, lse, other, other_lse)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-6)
    assert torch.equal(whole[:2], before[0])
    assert torch.equal(whole_lse[:, :2], before[1])
