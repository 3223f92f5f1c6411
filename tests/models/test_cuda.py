"""The CUDA paths: the variable-length kernel, blocks in fp32, and products with fp32 results."""

import pytest
import torch
from torch import Tensor

from tests.models.rows import RESPONSE_LENGTH, eager_log_probs, padded_rows
from tests.tiny_models import FAMILIES, tiny_model
from verl.models.attention import (
    Facts,
    Layout,
    _varlen_attention,
    apply_checkpointing,
    block_attention,
    varlen_can,
)
from verl.models.logprobs import Head, token_log_probs
from verl.models.packed import PackedBatch, PackedCausalLM
from verl.models.probe import check_packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = (37, 1, 130, 64, 5)


@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("window", [None, 2, 16, 500])
def test_the_kernel_agrees_with_blocks_in_float64(key_heads: int, window: int | None) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    total = sum(LENGTHS)
    ends = torch.tensor(
        [0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32, device="cuda"
    )
    facts = Facts(scale=0.2, window=window, cap=None, sinks=None)
    heads = (8, key_heads, key_heads)
    drawn = [
        torch.randn(total, count, 64, device="cuda", generator=generator).bfloat16()
        for count in heads
    ]

    weight = torch.randn(total, 8, 64, device="cuda", generator=generator)
    results: list[list[Tensor]] = []
    for attend, dtype in ((_varlen_attention, torch.bfloat16), (block_attention, torch.float64)):
        q, k, v = (tensor.detach().to(dtype).requires_grad_() for tensor in drawn)
        assert varlen_can(q, v, facts) == (dtype == torch.bfloat16)
        out = attend(q, k, v, Layout(LENGTHS, ends), facts)
        (out * weight).sum().backward()
        results.append([out, *(tensor.grad for tensor in (q, k, v) if tensor.grad is not None)])

    for ours, exact in zip(*results, strict=True):
        assert (ours.double() - exact).norm() / exact.norm() < 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_parity_holds_on_cuda(family: str) -> None:
    module = PackedCausalLM(tiny_model(family).cuda())
    apply_checkpointing(module)
    module.train()
    outputs = module(PackedBatch.from_rows(*padded_rows(), RESPONSE_LENGTH).to("cuda"))
    outputs["log_probs"].sum().backward()
    torch.testing.assert_close(
        outputs["log_probs"].detach().cpu(), eager_log_probs(family)[0], atol=3e-4, rtol=0
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_passes_the_check_at_load_on_cuda(family: str) -> None:
    check_packed(tiny_model(family, dtype=torch.bfloat16).cuda())


@pytest.mark.parametrize("cap", [None, 3.0])
def test_bf16_log_probs_keep_fp32_logits(cap: float | None) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(300, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(1000, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(1000, (300,), device="cuda", generator=generator)
    ours, entropy = token_log_probs(
        hidden, weight, targets, head=Head(1.0, cap), entropy=True, chunk_elements=64_000
    )
    (ours.sum() + entropy.sum()).backward()

    logits = hidden.detach().double() @ weight.detach().double().t()
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    log_p = logits.log_softmax(-1)
    torch.testing.assert_close(
        ours.double(), log_p.gather(1, targets[:, None]).squeeze(1), atol=1e-4, rtol=0
    )
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(-1), atol=1e-4, rtol=0)
    assert bool(hidden.grad is not None and hidden.grad.isfinite().all())

    assert bool(weight.grad is not None and weight.grad.isfinite().all())
