"""The kernel of the rotary embedding, interpreted on the CPU and compared with transformers'
formula."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.rollout.interpreter import interpreted
from verl.models.kernels.rope import rotate_heads


@pytest.mark.parametrize(("heads", "dim"), [(3, 8), (4, 24)])
@interpreted
def test_forward_and_backward(heads: int, dim: int):
    generator = torch.Generator().manual_seed(0)
    tokens = 5
    # The layout of a projection, and angles with unequal halves.
    q = torch.randn(1, tokens, heads, dim, generator=generator).transpose(1, 2).requires_grad_()
    cos, sin = torch.randn(2, 1, tokens, dim, generator=generator).unbind()
    grad = torch.randn(1, heads, tokens, dim, generator=generator)
    expected, _ = apply_rotary_pos_emb(q, q, cos, sin)
    got = rotate_heads(q, cos, sin, False)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert got.transpose(1, 2).is_contiguous()
    (want,) = torch.autograd.grad(expected, q, grad)
    (have,) = torch.autograd.grad(got, q, grad)
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
