"""Pictures and videos on CUDA: the kernel calls for pictures that see themselves against blocks in
float64, and models and the engine against transformers."""

from itertools import accumulate
from typing import Any

import pytest
import torch

from tests.gpu.test_shared_prompts_gpu import attend
from tests.models.test_ahead import layout_of
from tests.models.test_vision import expected_log_probs, packed_batch
from tests.rollout.engines import make_engine, tokens_of
from tests.rollout.test_pictures import answers, expected_answers, questions
from tests.tiny_vision_models import FAMILIES, tiny_vision_model
from verl.models.attention import (
    Facts,
    Layout,
    _needs_blocks,
    _varlen_attention,
    block_attention,
    varlen_can,
)
from verl.models.packed import PackedCausalLM
from verl.models.probe import check_packed
from verl.models.vision_attention import window_attention

pytestmark = pytest.mark.gpu
# Plain tokens and tokens of a picture, in turn: more than a tile of the kernel, and much less.
SEQUENCES = [[40, 256, 30], [300, 3, 200, 700, 5], [90], [0, 256, 1, 256, 0]]
PROMPTS = [[20, 256, 40], [5, 130, 3]]
RESPONSES = [[100], [1], [64, 200, 30], [300], [7]]


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute patches in float32: cuDNN rounds its inputs to TF32 by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def cuda_layout(shared: bool) -> Layout:
    sequences = [*SEQUENCES, *PROMPTS, *RESPONSES] if shared else SEQUENCES
    made = layout_of(sequences, shared=(3, 2) if shared else ())
    return Layout(made.lengths, made.cu_seqlens.cuda(), made.shared, ahead=made.ahead)


@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("shared", "window"), [(False, None), (False, 100), (False, 5000), (True, None), (True, 5000)]
)
def test_the_kernels_agree_with_blocks_in_float64(
    shared: bool, window: int | None, head_dim: int, key_heads: int
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    layout = cuda_layout(shared)
    facts = Facts(scale=head_dim**-0.5, window=window, cap=None, sinks=None)
    drawn = []
    for heads in (8, key_heads, key_heads):
        size = (layout.starts[-1], heads, head_dim)
        drawn.append(torch.randn(size, device="cuda", generator=generator).bfloat16())
    weight = torch.randn(drawn[0].shape, device="cuda", generator=generator)
    assert varlen_can(drawn[0], drawn[2], facts)
    assert not _needs_blocks(layout, facts)

    ours = attend(_varlen_attention, drawn, weight, layout, facts)
    in_float64 = [tensor.double() for tensor in drawn]
    exact = attend(block_attention, in_float64, weight.double(), layout, facts)
    for name, one, other in zip(("out", "q", "k", "v"), ours, exact, strict=True):
        error = ((one.double() - other).norm() / other.norm()).item()
        assert error < 1e-2, (name, error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_passes_the_check_at_load(family: str, dtype: torch.dtype) -> None:
    model: Any = tiny_vision_model(family, dtype=dtype)
    check_packed(model.cuda())


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probs_are_those_of_single_rows(family: str, shared: bool) -> None:
    expected = expected_log_probs(tiny_vision_model(family)).detach()
    model: Any = tiny_vision_model(family)
    batch = packed_batch(model, shared=shared).to("cuda")
    with torch.no_grad():
        ours = PackedCausalLM(model.cuda())(batch)["log_probs"]
    torch.testing.assert_close(ours.cpu().double(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str) -> None:
    model: Any = tiny_vision_model(family)
    asked = questions(model)
    expected = expected_answers(model, asked)
    engine = make_engine(model.cuda(), device="cuda", dtype="float32")
    assert tokens_of(answers(engine, asked)) == expected


@pytest.mark.parametrize("head_dim", [80, 72])
def test_all_windows_at_once_are_those_of_float64(head_dim: int) -> None:
    lengths = [64] * 30 + [48, 16, 4096, 64, 8]
    bounds = torch.tensor([0, *accumulate(lengths)], device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    size = (1, 4, int(bounds[-1]), head_dim)
    drawn = [torch.randn(size, device="cuda", generator=generator).bfloat16() for _ in range(3)]
    weight = torch.randn(1, size[2], 4, head_dim, device="cuda", generator=generator)

    def attended(dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [tensor.to(dtype).requires_grad_() for tensor in drawn]
        out, _ = window_attention(
            torch.nn.Identity(),
            *(*inputs, None),
            scaling=head_dim**-0.5,
            cu_seq_lens_q=bounds,
        )
        return [out, *torch.autograd.grad((out * weight).sum(), inputs)]

    for one, other in zip(attended(torch.bfloat16), attended(torch.float64), strict=True):
        error = ((one.double() - other).norm() / other.norm()).item()
        assert error < 1e-2, error
