"""The kernels of a decoder layer and of slots, interpreted on the CPU and compared with
transformers and plain indexing."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from tests.rollout.interpreter import interpreted
from verl.rollout.embedded.kernels.layers import add_rms_norm, swiglu
from verl.rollout.embedded.kernels.rope_store import rope_store
from verl.rollout.embedded.kernels.slots import advance, feed, store_tokens

EPS = 0.3  # large: without it, a norm would be far off
HEADS = 6
KV_HEADS = 3
PAGE_SIZE = 4
PAGES = torch.tensor([5, 0, 5])
OFFSETS = torch.tensor([3, 1, 0])
DTYPES = [torch.float32, torch.float16]


def assert_near(one: Tensor, other: Tensor) -> None:
    """Compare up to one rounding of a number of this size."""
    rtol, atol = (1e-5, 2e-6) if one.dtype == torch.float32 else (2e-3, 4e-3)
    torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 64])
@pytest.mark.parametrize("count", [1, 2, 3])
@interpreted
def test_add_rms_norm(count: int, width: int, dtype: torch.dtype):
    given = torch.randn(count, 3, width).to(dtype)
    norm = Qwen2RMSNorm(width, EPS).to(dtype).requires_grad_(False)
    norm.weight.copy_(torch.rand(width))
    total = given.float().sum(0).to(dtype)
    for writes_sum in (False, True):
        parts = given.clone().unbind()
        assert_near(add_rms_norm(parts, norm.weight, EPS, writes_sum=writes_sum), norm(total))
        assert torch.equal(parts[0], total if writes_sum else given[0])
        assert torch.equal(torch.stack(parts)[1:], given[1:])


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("count", [2, 3])
@interpreted
def test_add_rms_norm_adds_up_parts_of_products(count: int, splits: int):
    """Sum the parts of a product, and round the sum to the dtype of the others."""
    residual = torch.randn(5, 40).half()
    weight = torch.rand(40).half()
    sums = torch.randn(count - 1, splits, 5, 40)
    whole = [part.half() for part in sums.sum(1)]
    for writes_sum in (False, True):
        parts = [residual.clone(), *sums]
        rounded = [residual.clone(), *whole]
        out = add_rms_norm(parts, weight, EPS, writes_sum=writes_sum)
        assert_near(out, add_rms_norm(rounded, weight, EPS, writes_sum=writes_sum))
        assert_near(parts[0], rounded[0])


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("round_sum", [False, True])
@pytest.mark.parametrize("round_normed", [False, True])
@interpreted
def test_add_rms_norm_rounds_at_the_requested_places(
    count: int, round_sum: bool, round_normed: bool
):
    parts = torch.randn(count, 30, 64).half()
    weight = torch.rand(64).half()

    def expected(round_sum: bool, round_normed: bool) -> Tensor:
        wide = parts.float().sum(0)
        wide = wide.half().float() if round_sum else wide
        normed = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return ((normed.half().float() if round_normed else normed) * weight.float()).half()

    out = add_rms_norm(
        parts.clone().unbind(), weight, EPS, writes_sum=round_sum, round_normed=round_normed
    )
    for other_sum in (False, True):
        for other_normed in (False, True):
            same = (out == expected(other_sum, other_normed)).float().mean().item()
            # For some numbers, another order of summation changes the last bit of the variance.
            assert (same > 0.99) == ((other_sum, other_normed) == (round_sum, round_normed)), same


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [11, 1030])
@interpreted
def test_swiglu(width: int, dtype: torch.dtype):
    gate_up = 3 * torch.randn(3, 2 * width).to(dtype)
    gate, up = gate_up.chunk(2, dim=1)
    assert_near(swiglu(gate_up), torch.nn.functional.silu(gate) * up)


def interleaved_cache(dim: int, dtype: torch.dtype) -> Tensor:
    """Return NaN of shape (num_pages, layers, 2, Hk, page_size, D); unwritten elements stay NaN."""
    return torch.full((6, 2, 2, KV_HEADS, PAGE_SIZE, dim), float("nan"), dtype=dtype)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("dim", "dtype"), [(16, torch.float32), (12, torch.float32), (20, torch.float16)]
)
@interpreted
def test_rope_store(dim: int, dtype: torch.dtype, normed: bool):
    cos, sin = (table.repeat(1, 2).to(dtype) for table in torch.randn(2, 10, dim // 2))
    positions = torch.tensor([0, 7, 4])
    norms = [Qwen3RMSNorm(dim, EPS).to(dtype).requires_grad_(False) for _ in range(2)]
    for norm in norms:
        norm.weight.copy_(torch.rand(dim))
    qkv = torch.randn(3, (HEADS + 2 * KV_HEADS) * dim + 7).to(dtype)[:, :-7]
    heads = qkv.clone().view(3, -1, dim)
    q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    if normed:
        q, k = (norm(projected) for norm, projected in zip(norms, (q, k)))
    turned_q, turned_k = apply_rotary_pos_emb(q, k, cos[positions], sin[positions])

    cache = interleaved_cache(dim, dtype)
    query_norm, key_norm = (norm.weight if normed else None for norm in norms)
    rope_store(
        qkv,
        cos,
        sin,
        positions,
        PAGES,
        OFFSETS,
        *cache[:, 1].unbind(1),
        query_norm=query_norm,
        key_norm=key_norm,
        eps=EPS,
    )
    in_place = qkv.unflatten(1, (-1, dim))
    assert_near(in_place[:, :-KV_HEADS], torch.cat([turned_q, turned_k], dim=1))
    assert torch.equal(in_place[:, -KV_HEADS:], v)
    stored = interleaved_cache(dim, dtype)
    stored[PAGES, 1, 0, :, OFFSETS], stored[PAGES, 1, 1, :, OFFSETS] = turned_k, v
    assert_near(cache, stored)


@pytest.mark.parametrize("dtype", DTYPES)
@interpreted
def test_store_tokens(dtype: torch.dtype):
    new = torch.randn(3, KV_HEADS, 12).to(dtype)
    cache = interleaved_cache(12, dtype)
    stored = interleaved_cache(12, dtype)
    store_tokens(new.transpose(0, 1), cache[:, 1, 0], PAGES, OFFSETS)
    stored[PAGES, 1, 0, :, OFFSETS] = new
    torch.testing.assert_close(cache, stored, rtol=0, atol=0, equal_nan=True)


@interpreted
def test_feed_reads_the_content_of_each_slot():
    """Use more rows than one program has, unordered slots, and a slice of a wider table."""
    count = 150
    width = 5
    slots = torch.randperm(count)[:140].int()
    tokens = torch.randint(2**40, (count,))
    positions = torch.randint(width * PAGE_SIZE, (count,), dtype=torch.int32)
    table = torch.randint(2**20, (count, width + 3), dtype=torch.int32)[:, :width]
    fed = tuple(torch.full((140,), -1) for _ in range(4))
    feed(slots, tokens, positions, table, PAGE_SIZE, fed)
    index = slots.long()
    place = positions[slots.long()].long()
    for one, other in zip(
        fed, (tokens[index], place, table[index, place // PAGE_SIZE].long(), place % PAGE_SIZE)
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("by", [0, 1])
@interpreted
def test_advance_does_not_change_the_idle_slot_and_slots_not_named(by: int):
    slots = torch.cat([torch.randperm(149)[:135], torch.full((5,), 149)]).int()
    drawn_tokens = torch.randint(2**40, (140,))
    tokens = torch.randint(2**40, (150,))
    positions = torch.arange(150).int()
    drawn = torch.arange(300, 450).int()
    expected = [state.clone() for state in (tokens, positions, drawn)]
    live = slots[:135].long()
    expected[0][live] = drawn_tokens[:135]
    expected[1][live] += by
    expected[2][live] += 1
    advance(slots, drawn_tokens, tokens, positions, drawn, by=by)
    for state, after in zip((tokens, positions, drawn), expected):
        assert torch.equal(state, after)
