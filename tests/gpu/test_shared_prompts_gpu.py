"""Shared prompts on CUDA: the kernel calls against blocks in float64, models and the engine against
plain packing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.models.grouped import Group, Rows, grouped_rows
from tests.tiny_models import FAMILIES, tiny_model
from verl.models.attention import (
    Facts,
    Layout,
    _varlen_attention,
    apply_checkpointing,
    block_attention,
    varlen_can,
)
from verl.models.packed import PackedCausalLM

pytestmark = pytest.mark.gpu
# More than one tile of the kernel in prompts and responses, and much less than one.
LONG: tuple[Group, ...] = (
    (300, (140, 1, 260, 64)),
    (5, (200, 3)),
    (77, (129,)),
    (128, (128, 128, 128)),
    (1, (2, 150)),
)


def layout_of(rows: Rows, *, share: bool) -> Layout:
    batch = rows.pack(share=share).to("cuda")
    return Layout(batch.lengths, batch.cu_seqlens, batch.shared)


def attend(
    function: Callable[..., Tensor],
    drawn: list[Tensor],
    weight: Tensor,
    layout: Layout,
    facts: Facts,
):
    """Return the output and the gradients of queries, keys and values."""
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in drawn)
    out = function(q, k, v, layout, facts)
    (out * weight).sum().backward()
    return [out.detach(), *(tensor.grad for tensor in (q, k, v) if tensor.grad is not None)]


# Three pieces of responses each; one may be empty.
PIECES: tuple[Group, ...] = ((300, (1100, 900, 70)), (140, (1, 1)), (5, (600, 700)))


@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("groups", "window"), [*((LONG, size) for size in (None, 2, 16, 200, 5000)), (PIECES, None)]
)
def test_the_kernel_agrees_with_blocks_in_float64(
    groups: tuple[Group, ...], key_heads: int, head_dim: int, window: int | None
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    layout = layout_of(grouped_rows(groups), share=True)
    assert layout.shared == ((4, 2, 3, 2) if groups is LONG else (3, 2, 2))
    total = layout.starts[-1]
    facts = Facts(scale=head_dim**-0.5, window=window, cap=None, sinks=None)
    drawn = [
        torch.randn(total, heads, head_dim, device="cuda", generator=generator).bfloat16()
        for heads in (8, key_heads, key_heads)
    ]

    weight = torch.randn(total, 8, head_dim, device="cuda", generator=generator)
    assert varlen_can(drawn[0], drawn[2], facts)
    ours = attend(_varlen_attention, drawn, weight, layout, facts)
    exact = attend(
        block_attention, [tensor.double() for tensor in drawn], weight.double(), layout, facts
    )

    for one, other in zip(ours, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() / other.norm() < 1e-2


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_fp32_gives_the_plain_log_probs_and_gradients(
    family: str, checkpointing: bool
) -> None:
    rows = grouped_rows()
    results = []
    for share in (False, True):
        module = PackedCausalLM(tiny_model(family).cuda()).train()
        if checkpointing:
            apply_checkpointing(module)
        log_probs = module(rows.pack(share=share).to("cuda"))["log_probs"]
        (log_probs * torch.linspace(-1, 1, len(log_probs), device="cuda")).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
        results.append((log_probs.detach(), gradient))
    (plain, plain_gradient), (shared, shared_gradient) = results
    torch.testing.assert_close(shared, plain, rtol=0, atol=3e-4)
    assert (shared_gradient - plain_gradient).norm() < 1e-4 * plain_gradient.norm()


@pytest.mark.parametrize("window", [None, 24])
def test_a_model_in_bf16_is_as_near_to_fp32_as_plain_packing(window: int | None) -> None:
    family, settings = ("qwen2", {}) if window is None else ("mistral", {"sliding_window": window})
    settings |= {"head_dim": 64, "hidden_size": 128, "max_position_embeddings": 1024}
    rows = grouped_rows(LONG)

    def run(share: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        model = tiny_model(family, **settings)
        with torch.no_grad():
            # Large weights make bf16 rounding as large as the signal; halved, the model is still
            # far from flat.
            for parameter in model.parameters():
                parameter.mul_(0.5)
        module = PackedCausalLM(model.to("cuda", dtype))
        log_probs = module(rows.pack(share=share).to("cuda"))["log_probs"]
        (log_probs * torch.linspace(-1, 1, len(log_probs), device="cuda")).sum().backward()
        gradient = torch.cat(
            [p.grad.flatten().float() for p in module.parameters() if p.grad is not None]
        )
        return log_probs.detach(), gradient

    exact, exact_gradient = run(False, torch.float32)
    plain, plain_gradient = run(False, torch.bfloat16)
    shared, shared_gradient = run(True, torch.bfloat16)
    assert (shared - exact).norm() < 1.3 * (plain - exact).norm()
    assert (shared_gradient - exact_gradient).norm() < 1.3 * (
        plain_gradient - exact_gradient
    ).norm()


def test_offsets_reach_the_device_without_synchronization() -> None:
    batch = grouped_rows(LONG).pack(share=True).to("cuda")
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layout = Layout(batch.lengths, batch.cu_seqlens, batch.shared)
        parts, (keys, ends) = layout.parts, layout.keys_within(16)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert parts.across.query_offsets.tolist() == [0, 465, 668, 1052, 1204]
    assert parts.across.key_offsets.tolist() == [0, 300, 305, 433, 434]
    assert parts.copied.device.type == parts.copies.device.type == "cuda"
    assert int(ends[-1]) == len(keys)
