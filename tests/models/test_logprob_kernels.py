"""The kernels of log-probs, interpreted on the CPU and compared with the plain operations that they
replace."""

import pytest
import torch
from torch import Tensor

from tests.rollout.interpreter import interpreted
from verl.models import logprobs as plain
from verl.models.kernels import logprobs as kernels

VOCABULARY = 5000  # more than one block, and no multiple of it


def problem() -> tuple[Tensor, Tensor]:
    """Return rows with a wide spread; one rises from a low start, one is sure of its token."""
    generator = torch.Generator().manual_seed(0)
    y = 3 * torch.randn(4, VOCABULARY, generator=generator)
    y[1] = torch.linspace(-300, -100, VOCABULARY)
    y[2, 4700] = 80
    return y, torch.tensor([0, 4999, 4700, 4096])


@interpreted
def test_statistics():
    y, targets = problem()
    want = plain.row_statistics(y.double(), targets, entropy=True)
    got = kernels.row_statistics(y, targets, entropy=True)
    for one, other in zip(got, want):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    assert kernels.row_statistics(y, targets, entropy=False)[2] is None


@pytest.mark.parametrize("bound", [None, 400.0])
@pytest.mark.parametrize("given", ["log_probs", "entropies", "both"])
@interpreted
def test_gradient(bound: float | None, given: str):
    y, targets = problem()
    precise = y.double()
    normalizers, _, entropies = plain.row_statistics(precise, targets, entropy=True)
    assert entropies is not None
    grads = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.3, 0.0, -1.0, 2.0]], dtype=torch.float64)
    grad_log_probs, grad_entropies = (
        None if given == left else grad for left, grad in zip(("entropies", "log_probs"), grads)
    )

    given_grads = (grad_log_probs, grad_entropies)
    want = plain.grad_linear(
        precise,
        targets,
        normalizers,
        entropies,
        *given_grads,
        slope=0.7,
        bound=bound,
        dtype=torch.float64,
    )

    fp32 = (None if grad is None else grad.float() for grad in given_grads)
    got = kernels.grad_linear(
        y,
        targets,
        normalizers.float(),
        entropies.float(),
        *fp32,
        slope=0.7,
        bound=bound,
        dtype=torch.float32,
    )

    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)
