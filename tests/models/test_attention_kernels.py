"""Long sequences by dense attention, short ones by another kernel, on the CPU; tests/gpu has the
kernels themselves."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis.strategies import lists, sampled_from
from torch import Tensor
from torch.nn.attention import SDPBackend

from verl.models.kernels import attention as attention_kernels
from verl.models.kernels.attention import cudnn_attention

SCALE = 0.3


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], offsets: Tensor, scale: float
) -> Tensor:
    assert offsets.tolist()[-1] == sum(lengths) == len(q)
    outputs = []
    for rows in zip(*(tensor.split(list(lengths)) for tensor in (q, k, v))):
        heads = (tensor.transpose(0, 1) for tensor in rows)
        outputs.append(
            F.scaled_dot_product_attention(
                *heads, is_causal=True, scale=scale, enable_gqa=True
            ).transpose(0, 1)
        )
    return torch.cat(outputs)


@settings(max_examples=60)
@given(lengths=lists(sampled_from([1, 5, 7, 8, 9, 12, 16, 21]), min_size=1, max_size=7))
def test_long_and_short_sequences_in_one_batch(lengths: list[int]):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_kernels, "CUDNN_TILE", 4)
        patch.setattr(attention_kernels, "CUDNN_SHORTEST", 8)
        generator = torch.Generator().manual_seed(0)
        shapes = [(sum(lengths), heads, 6) for heads in (4, 2, 2)]
        q, k, v = (
            torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
            for shape in shapes
        )

        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        grad = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
        results = []

        for out in (
            one_by_one(q, k, v, lengths, offsets, SCALE),
            cudnn_attention(
                q, k, v, lengths, offsets, SCALE, short=one_by_one, backend=SDPBackend.MATH
            ),
        ):
            results.append([out, *torch.autograd.grad(out, (q, k, v), grad)])

        for expected, got in zip(*results):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
