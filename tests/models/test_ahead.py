"""Kernel calls for pictures whose tokens see one another give the result of blocks with a mask."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers, lists, sampled_from
from torch import Tensor

from tests.models.grouped import kernel_backward, kernel_forward
from verl.models import attention, shared_prompts
from verl.models.attention import Facts, Layout, block_attention
from verl.models.kernels import varlen

# Of a sequence: plain tokens and tokens of a picture, in turn.
SEQUENCES = [[2, 5, 1, 4], [0, 3], [7], [1, 1, 0, 6, 2]]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "forward", kernel_forward)
    monkeypatch.setattr(varlen, "backward", kernel_backward)


def layout_of(sequences: list[list[int]], shared: tuple[int, ...] = ()) -> Layout:
    lengths = tuple(sum(parts) for parts in sequences)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    ahead = []
    for parts in sequences:
        for number, count in enumerate(parts):
            is_picture = number % 2 == 1
            ahead += range(count - 1, -1, -1) if is_picture else [0] * count
    return Layout(lengths, ends, shared, ahead=torch.tensor(ahead))


def attend(function: Callable[..., Tensor], layout: Layout, window: int | None) -> list[Tensor]:
    """Return the output and the gradients of queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for heads in (4, 2, 2):
        size = (layout.starts[-1], heads, 8)
        tensor = torch.randn(size, generator=generator, dtype=torch.float64)
        drawn.append(tensor.requires_grad_())
    out = function(*drawn, layout, Facts(0.9, window, None, None))
    (out * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum().backward()
    return [out.detach(), *(tensor.grad for tensor in drawn if tensor.grad is not None)]


def assert_same(layout: Layout, window: int | None) -> None:
    ours = attend(attention._varlen_attention, layout, window)
    for one, other in zip(ours, attend(block_attention, layout, window), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_blocks_follow_the_definition() -> None:
    layout = layout_of(SEQUENCES)
    assert layout.ahead is not None
    for window in (None, 1, 3):
        place = torch.arange(layout.starts[-1])
        owner = torch.bucketize(place, torch.tensor(layout.starts[1:]), right=True)
        distance = place[:, None] - place[None, :]
        seen = (owner[:, None] == owner[None, :]) & (distance >= -layout.ahead[:, None])
        seen &= distance < (window or len(place))
        generator = torch.Generator().manual_seed(0)
        q, k, v = torch.randn(3, len(place), 2, 8, generator=generator, dtype=torch.float64)
        out = block_attention(q, k, v, layout, Facts(0.9, window, None, None))
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.9
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        torch.testing.assert_close(out, torch.einsum("hqk,khd->qhd", weights, v))


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 500])
def test_kernel_calls_give_the_result_of_blocks(window: int | None) -> None:
    assert_same(layout_of(SEQUENCES), window)


@given(
    sequences=lists(
        lists(integers(0, 9), min_size=1, max_size=5).filter(any), max_size=5, min_size=1
    ),
    window=sampled_from([None, 1, 4, 50]),
)
@settings(max_examples=30, deadline=None)
def test_any_pictures_are_attended(sequences: list[list[int]], window: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "forward", kernel_forward)
        patch.setattr(varlen, "backward", kernel_backward)
        assert_same(layout_of(sequences), window)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("window", [None, 500])
def test_prompts_with_pictures_are_shared(window: int | None) -> None:
    prompts = [[3, 4, 2], [1, 2, 1, 5, 1]]
    responses = [[4], [3, 2, 1], [2], [6], [1, 4]]  # a tool may return a picture
    layout = layout_of([*SEQUENCES, *prompts, *responses], shared=(3, 2))
    assert_same(layout, window)


def test_a_window_within_shared_prompts_takes_blocks() -> None:
    layout = layout_of([[3, 4, 2], [4], [5]], shared=(2,))
    assert attention._needs_blocks(layout, Facts(1.0, 3, None, None))
    assert not attention._needs_blocks(layout, Facts(1.0, 500, None, None))
    assert not attention._needs_blocks(layout_of(SEQUENCES), Facts(1.0, 3, None, None))


@pytest.mark.usefixtures("kernel")
def test_a_log_sum_exp_of_one_part_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    merge = shared_prompts._merge_

    def keep(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        merge(out, lse.clone(), other, other_lse)

    layout = layout_of(SEQUENCES)
    expected = attend(block_attention, layout, None)
    monkeypatch.setattr(shared_prompts, "_merge_", keep)
    out, *gradients = attend(attention._varlen_attention, layout, None)
    torch.testing.assert_close(out, expected[0])
    for ours, theirs in zip(gradients, expected[1:], strict=True):
        assert (ours - theirs).norm() > 1e-2 * theirs.norm()
