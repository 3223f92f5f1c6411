"""The kernel of a head without logits, interpreted on the CPU and compared with the plain
operations that it replaces."""

import pytest
import torch

from tests.rollout.interpreter import interpreted
from verl.models import logprobs as plain
from verl.models.kernels import head as kernels


@pytest.mark.parametrize("bound", [None, 8.0])
@pytest.mark.parametrize(
    "words", [700, 768, 200]
)  # the last tile partial, then whole; a single tile
@interpreted
def test_statistics(words: int, bound: float | None):
    generator = torch.Generator().manual_seed(0)
    # The interpreter would multiply the bits of bfloat16 as integers.
    hidden = torch.randn(131, 72, generator=generator).half()
    weight = torch.randn(words, 72, generator=generator).half()
    weight[150] *= 20  # a token with a probability near 1 in some rows
    targets = torch.randint(words, (131,), generator=generator)
    targets[:3] = torch.tensor([0, words - 1, 150])
    linear = 0.7 * hidden.double() @ weight.double().t()
    y = linear if bound is None else bound * torch.tanh(linear / bound)

    want = plain.row_statistics(y, targets, entropy=True)
    got = kernels.head_statistics(hidden, weight, targets, slope=0.7, bound=bound, entropy=True)
    for one, other in zip(got, want):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-5)

    without = kernels.head_statistics(
        hidden, weight, targets, slope=0.7, bound=bound, entropy=False
    )
    assert without[2] is None
    assert torch.equal(without[0], got[0])


@interpreted
def test_shapes_that_bulk_copies_cannot_read():
    good = torch.zeros(4, 16, dtype=torch.bfloat16)
    assert kernels.can_read(good, good)
    for bad in (
        good.float(),
        good.half(),
        good[:, 1:9],
        good.t(),
        torch.zeros(4, 12, dtype=torch.bfloat16),
    ):
        assert not kernels.can_read(good, bad)
