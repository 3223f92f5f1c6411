"""Keys and values in eight bits: attention, stores, copies, decode steps, refusals, memory.

Kernels are interpreted on the CPU; tests/gpu/test_eight_bits_gpu.py has whole rollouts.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn

from tests.cases import cases
from tests.rollout.interpreter import interpreted
from tests.rollout.test_cuda_decoder import (
    LENGTH,
    PAGE_SIZE,
    ROWS,
    TABLE,
    make_decoder,
    make_model,
    make_step,
)
from tests.rollout.test_eight_bits import SMALL, relative_l2
from tests.rollout.test_paged_attention_kernel import (
    FEATURES,
    Batch,
    assert_near,
    attend,
    expected,
    make_batch,
    rows_of,
    store_newest,
    take_out_newest,
)
from tests.rollout.test_shared_prefix_kernel import make_shared
from verl.agents.policies import _engine_config
from verl.config import TrainConfig
from verl.config.rollout import RolloutConfig
from verl.diagnostics.batch import BatchPlan
from verl.diagnostics.rollout_memory import plan_rollout
from verl.engine.model_shape import ModelShape
from verl.models.attention import Facts, Layout
from verl.rollout.base import check_engine, check_engine_model
from verl.rollout.eight_bits import FP8, quantize
from verl.rollout.embedded import cuda_runner, quantization
from verl.rollout.embedded.attention import LayerPages, LayerShape
from verl.rollout.embedded.cuda_decoder import DevicePrefillStep, TritonDecoder
from verl.rollout.embedded.cuda_runner import CudaRunner
from verl.rollout.embedded.extension import extend_step
from verl.rollout.embedded.kernels.rope_store import rope_store
from verl.rollout.embedded.kernels.slots import store_tokens
from verl.rollout.embedded.runner import ModelRunner
from verl.utils.errors import ConfigError

HEADS = 6
KV_HEADS = 3
DIM = 12
PAGES = torch.tensor([5, 0, 5])
OFFSETS = torch.tensor([3, 1, 0])
UNTOUCHED = 0x7F  # NaN in FP8
# of rounding, in the outputs of attention: FP8 has 4 significant bits, int8 7 of the largest
SMALLEST_ERROR = {FP8: 0.01, torch.int8: 0.002}
SLOW = pytest.mark.slow


def rounded(cache: Tensor, small: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a cache (num_pages, Hk, page_size, D) in eight bits, and its scales.

    Neither is contiguous, as where layers interleave.
    """
    rows = quantize(cache.reshape(-1, cache.shape[-1]), dtype=small)
    values = torch.empty(len(cache), 2, *cache.shape[1:], dtype=small)[:, 1]
    values.view(torch.uint8).copy_(rows.values.view(cache.shape).view(torch.uint8))
    scales = torch.empty(len(cache), 3, *cache.shape[1:3])[:, 2]
    scales.copy_(rows.scales.view(cache.shape[:3]))
    return values, scales


def wide(cache: Tensor, scales: Tensor) -> Tensor:
    return cache.float() * scales[..., None]


class Small(NamedTuple):
    batch: Batch  # with keys and values in eight bits
    scales: dict[str, Tensor]
    truth: Batch  # with the numbers that these stand for, in fp32


def in_eight_bits(batch: Batch, small: torch.dtype) -> Small:
    keys, key_scales = rounded(batch.keys, small)
    values, value_scales = rounded(batch.values, small)
    truth = batch._replace(keys=wide(keys, key_scales), values=wide(values, value_scales))
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    return Small(batch._replace(keys=keys, values=values), scales, truth)


def uneven(batch: Batch) -> Batch:
    """Give tokens and heads keys and values of different sizes, so that every scale matters."""
    for cache in (batch.keys, batch.values):
        sizes = torch.rand(cache.shape[:3]) + 0.5
        cache.mul_(sizes[..., None].to(cache.dtype))
    return batch


# ---------------------------------------------------------------- attention


def is_quick(features: dict[str, Any], small: torch.dtype) -> bool:
    """Return whether the quick suite has a case: of int8, it has all features at once."""
    return small == FP8 or features == FEATURES[-1]


ATTENTION = [
    *((features, {"num_splits": 3}) for features in FEATURES),
    *((features, {}) for features in FEATURES[::4]),
    *((features, {"split_tokens": 16}) for features in FEATURES[::4]),
]


@pytest.mark.parametrize(
    ("features", "splits", "dtype"),
    [
        pytest.param(features, splits, small, marks=() if is_quick(features, small) else SLOW)
        for features, splits in ATTENTION
        for small in SMALL
    ],
)
@interpreted
def test_a_row_attends_to_pages_in_eight_bits(
    features: dict[str, Any], splits: dict[str, Any], dtype: torch.dtype
):
    batch = uneven(make_batch())
    small = in_eight_bits(batch, dtype)
    out = attend(small.batch, **features, **splits, **small.scales)
    truth = expected(small.truth, **features)
    assert_near(out, truth)
    assert (truth - expected(batch, **features)).abs().max() > SMALLEST_ERROR[dtype]


@pytest.mark.parametrize("dtype", SMALL)
@interpreted
def test_shared_pages_in_eight_bits(dtype: torch.dtype):
    batch, hidden, prefixes = make_shared()
    small = in_eight_bits(uneven(batch), dtype)
    shared = small.batch._replace(table=hidden.table)
    assert_near(attend(shared, **small.scales, prefixes=prefixes), expected(small.truth))


@pytest.mark.parametrize("page_size", [8, 32])
@pytest.mark.parametrize("dtype", SMALL)
@interpreted
def test_half_precision_and_a_separate_value_size(page_size: int, dtype: torch.dtype):
    batch = make_batch(torch.float16, value_dim=16, page_size=page_size)
    small = in_eight_bits(uneven(batch), dtype)
    assert_near(attend(small.batch, num_splits=2, **small.scales), expected(small.truth), 4e-3)


@pytest.mark.parametrize("size", [1e-4, 1e4])
@pytest.mark.parametrize("dtype", SMALL)
@interpreted
def test_products_in_float16_hold_all_of_bfloat16(size: float, dtype: torch.dtype):
    """Queries and values may be beyond float16's numbers, or below its normal ones."""
    batch = make_batch(torch.bfloat16)
    batch.q.mul_(size)
    batch.keys.div_(size)
    batch.values.mul_(size)
    small = in_eight_bits(batch, dtype)
    truth = expected(small.truth) / size
    # The interpreter cuts bfloat16 off instead of rounding it.
    assert_near(attend(small.batch, num_splits=2, **small.scales) / size, truth, 4e-2)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("splits", [{}, {"num_splits": 3}])
@pytest.mark.parametrize(
    ("features", "dtype"), cases([{}, {"window": 1}, FEATURES[-1]], SMALL, quick=is_quick)
)
@interpreted
def test_a_fresh_token_is_rounded_when_it_is_stored(
    features: dict[str, Any], splits: dict[str, Any], normed: bool, dtype: torch.dtype
):
    """Its own row takes its exact numbers."""
    batch, fresh = take_out_newest(rows_of(uneven(make_batch()), [0, 1, 2, 3]), normed)
    small = in_eight_bits(batch, dtype)
    truth = store_newest(small.truth, fresh)
    out = attend(small.batch, **features, **splits, **small.scales, fresh=fresh)
    assert_near(out, expected(truth, **features))

    caches = ((small.batch.keys, truth.keys), (small.batch.values, truth.values))
    for (cache, exact), scales in zip(caches, small.scales.values()):
        numbers, exact_scales = rounded(exact, dtype)
        torch.testing.assert_close(scales, exact_scales, rtol=1e-5, atol=0, equal_nan=True)
        same = cache.float() == numbers.float()
        assert same[~exact.isnan()].float().mean() > 0.999, "a border of eight bits here and there"
        assert torch.equal(wide(cache, scales).isnan(), exact.isnan())


# ---------------------------------------------------------------- stores


def empty_pages(small: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return pages of UNTOUCHED bytes and scales of NaN, each of the second of two layers."""
    cache = torch.full((6, 2, KV_HEADS, PAGE_SIZE, DIM), UNTOUCHED, dtype=torch.uint8).view(small)
    return cache[:, 1], torch.full((6, 2, KV_HEADS, PAGE_SIZE), float("nan"))[:, 1]


def stored(cache: Tensor, scales: Tensor, heads: Tensor) -> None:
    """Check that pages hold the rounded heads (3, Hk, D) at PAGES and OFFSETS, and no others."""
    small = cache.dtype
    rows = quantize(heads.reshape(-1, DIM), dtype=small)
    own_scales = scales[PAGES, :, OFFSETS]
    torch.testing.assert_close(own_scales, rows.scales.view(3, KV_HEADS), rtol=1e-5, atol=0)
    found = cache.view(torch.uint8)[PAGES, :, OFFSETS].view(small).float()
    same = found == rows.values.view(heads.shape).float()
    assert same.float().mean() > 0.98, "a border of eight bits here and there"
    exact = heads.float()
    step = own_scales[..., None].expand_as(exact)
    if small == FP8:
        step = torch.maximum(exact.abs() / 8, step / 512)
    assert ((found * own_scales[..., None] - exact).abs() <= 0.51 * step).all()

    assert scales.isfinite().sum() == len(PAGES) * KV_HEADS
    others = torch.ones(6, PAGE_SIZE, dtype=torch.bool)
    others[PAGES, OFFSETS] = False
    assert (cache.view(torch.uint8).transpose(1, 2)[others] == UNTOUCHED).all()


def uneven_heads(count: int, dtype: torch.dtype) -> Tensor:
    """Return heads (3, count, DIM), the last of them zeros in the last token."""
    heads = torch.randn(3, count, DIM) * torch.randn(3, count, 1).exp()
    heads[2, -1] = 0
    return heads.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("small", SMALL)
@interpreted
def test_store_tokens(dtype: torch.dtype, small: torch.dtype):
    new = uneven_heads(KV_HEADS, dtype)
    cache, scales = empty_pages(small)
    store_tokens(new.transpose(0, 1), cache, PAGES, OFFSETS, scales)
    stored(cache, scales, new)
    rows = quantize(new.reshape(-1, DIM), dtype=small)
    found = cache.view(torch.uint8)[PAGES, :, OFFSETS]
    assert torch.equal(found, rows.values.view(torch.uint8).view(found.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("small", SMALL)
@interpreted
def test_rope_store(dtype: torch.dtype, small: torch.dtype):
    """Compare with the heads that it rotates in place; other tests prove these."""
    cos, sin = (table.repeat(1, 2).to(dtype) for table in torch.randn(2, 10, DIM // 2))
    qkv = uneven_heads(HEADS + 2 * KV_HEADS, dtype)
    keys, key_scales = empty_pages(small)
    values, value_scales = empty_pages(small)
    flat = qkv.flatten(1)
    rope_store(
        flat,
        cos,
        sin,
        torch.tensor([0, 7, 4]),
        PAGES,
        OFFSETS,
        keys,
        values,
        key_scales=key_scales,
        value_scales=value_scales,
    )
    _, turned_k, v = flat.view(3, -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    stored(keys, key_scales, turned_k)
    stored(values, value_scales, v)


@pytest.mark.parametrize("small", SMALL)
@interpreted
def test_broken_tokens_stay_broken(small: torch.dtype):
    new = torch.zeros(3, KV_HEADS, DIM)
    new[0, 1, 4] = float("nan")
    new[1, 1, 4] = float("inf")
    cache, scales = empty_pages(small)
    store_tokens(new.transpose(0, 1), cache, PAGES, OFFSETS, scales)
    found = wide(cache, scales)[PAGES, :, OFFSETS]
    assert found[0, 1].isnan().any()
    assert not found[1, 1].isfinite().all()
    assert (found[:, 0] == 0).all()


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize("small", SMALL)
def test_copies_of_pages_keep_scales(small: torch.dtype):
    keys, key_scales = rounded(torch.randn(6, 2, 8, 4), small)
    values, value_scales = rounded(torch.randn(6, 2, 8, 4), small)
    pages = LayerPages(keys, values, key_scales, value_scales)
    before = [part.clone() for part in pages.tensors]
    runner: Any = SimpleNamespace(paging=SimpleNamespace(layers={0: pages}))
    runner.to_device = torch.from_numpy
    ModelRunner.copy_pages(runner, [(1, 4), (4, 2)])
    for part, old in zip(pages.tensors, before, strict=True):
        assert torch.equal(part, old[[0, 1, 4, 3, 1, 5]])
    assert len(before) == 4


class FakeMemory:
    """Host memory in place of `ReservedMemory`."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def grow(self, num_bytes: int) -> None:
        self.bytes = torch.zeros(num_bytes, dtype=torch.uint8)

    def tensor(self, offset: int, size: Any, dtype: torch.dtype, strides: Any) -> Tensor:
        return self.bytes[offset:].view(dtype).as_strided(size, strides)


@pytest.mark.parametrize("dtype", [*SMALL, torch.bfloat16])
def test_parts_of_pages_fill_the_memory_without_overlap(dtype: torch.dtype, monkeypatch):
    monkeypatch.setattr(cuda_runner, "ReservedMemory", FakeMemory)
    device = SimpleNamespace(total_memory=1 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    facts = cast(Facts, None)
    shapes = {
        nn.Linear(1, 1): LayerShape(2, 16, 16, facts),
        nn.Linear(1, 1): LayerShape(1, 24, 8, facts),
    }
    runner: Any = SimpleNamespace(device="cuda", page_size=8, cache_dtype=dtype, _memory=None)
    runner.layer_shapes = lambda: shapes
    runner.paging = SimpleNamespace(layers={})
    runner.slots = SimpleNamespace(set_padding=lambda _: None)
    runner.page_bytes = cast(Any, ModelRunner.page_bytes).fget(runner)
    token_bytes = 2 * (32 + 8) + (32 + 8) if dtype in SMALL else 2 * (2 * 32 + 32)
    assert runner.page_bytes == 8 * token_bytes

    CudaRunner.allocate(runner, 3)
    filled = 0
    for pages in runner.paging.layers.values():
        for part in pages.tensors:
            mine = part.view(torch.uint8)
            assert (mine == 0).all(), "another part has written here"
            mine.fill_(1)
            filled += mine.numel()
    assert filled == 4 * runner.page_bytes
    assert (runner._memory.bytes == 1).all()


# ---------------------------------------------------------------- decode steps


def prefilled(decoder: TritonDecoder, ids: Tensor, first: int) -> None:
    """Compute the first tokens of ids (ROWS, LENGTH)."""
    places = torch.arange(first).repeat(ROWS)
    rows = torch.arange(ROWS).repeat_interleave(first)
    ends = torch.arange(0, ROWS * first + 1, first, dtype=torch.int32)
    pages = TABLE[rows, places // PAGE_SIZE].long()
    step = DevicePrefillStep(Layout((first,) * ROWS, ends), pages, places % PAGE_SIZE)
    with decoder.paging.computing(step):
        decoder(ids[:, :first].flatten(), places, step)


def decoded(decoder: TritonDecoder, ids: Tensor, first: int, *, takes_fresh: bool) -> Tensor:
    states = []
    for position in range(first, LENGTH):
        positions = torch.full((ROWS,), position)
        step = make_step(positions, TABLE, takes_fresh=takes_fresh)
        states.append(decoder(ids[:, position], positions, step))
    return torch.stack(states, dim=1)


def extended(decoder: TritonDecoder, ids: Tensor, first: int) -> Tensor:
    count = LENGTH - first
    places = torch.arange(first, LENGTH).repeat(ROWS)
    rows = torch.arange(ROWS).repeat_interleave(count)
    ends = torch.arange(0, ROWS * count + 1, count, dtype=torch.int32)
    pages = TABLE[rows, places // PAGE_SIZE].long()
    new = DevicePrefillStep(Layout((count,) * ROWS, ends), pages, places % PAGE_SIZE)
    step = extend_step(new, (first,) * ROWS, TABLE.tolist(), PAGE_SIZE)
    return decoder(ids[:, first:].flatten(), places, step).view(ROWS, count, -1)


@pytest.mark.parametrize(
    ("small", "family"),
    cases(
        SMALL,
        ["qwen3", "gemma3", "qwen2", "gemma2"],
        quick=lambda *case: case == (FP8, "qwen3"),
    ),
)
@interpreted
def test_decode_steps_and_extensions_read_the_same_pages(family: str, small: torch.dtype):
    """Compare steps that store their token first with an extension; they differ by fp32 alone."""
    model = make_model(family, torch.float32)
    ids = torch.randint(50, (ROWS, LENGTH))
    exact = cast(Any, model).model(input_ids=ids).last_hidden_state
    first = 4
    found = {}
    for name in ("extended", "stored", "fresh"):
        decoder = make_decoder(model, small)
        prefilled(decoder, ids, first)
        if name == "extended":
            found[name] = extended(decoder, ids, first)
        else:
            found[name] = decoded(decoder, ids, first, takes_fresh=name == "fresh")
        assert all(pages.keys.dtype == small for pages in decoder.paging.layers.values())

    rounding = relative_l2(found["stored"], exact[:, first:])
    assert SMALLEST_ERROR[small] / 4 < rounding < 20 * SMALLEST_ERROR[small]
    assert relative_l2(found["extended"], found["stored"]) < 0.01 * rounding
    assert 0 < relative_l2(found["fresh"], found["stored"]) < rounding
    assert relative_l2(found["fresh"], exact[:, first:]) < 1.1 * rounding


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"deterministic": True}, "kv_cache_dtype=fp8 .*deterministic=true forbids this"),
        ({"dtype": "float16"}, "in bfloat16 or float32, got .*dtype=float16"),
        ({"name": "hf"}, "name=hf. Set name=embedded, or kv_cache_dtype=auto; servers"),
        ({"name": "vllm"}, "name=vllm. Set name=embedded, or kv_cache_dtype=auto; servers"),
    ],
)
def test_settings_that_exclude_eight_bits(setting: dict[str, Any], message: str):
    check_engine(RolloutConfig(kv_cache_dtype="fp8"))
    check_engine(RolloutConfig(kv_cache_dtype="fp8", tensor_model_parallel_size=2))
    check_engine(RolloutConfig(kv_cache_dtype="fp8", quantization="fp8"))
    with pytest.raises(ConfigError, match=message):
        check_engine(RolloutConfig(kv_cache_dtype="fp8", **setting))


def test_devices_without_eight_bits(monkeypatch):
    config = RolloutConfig(kv_cache_dtype="fp8")
    model = make_model("mixtral", torch.float32).config
    check_engine_model(config, model, on_cuda=True)
    with pytest.raises(ConfigError, match="8.9 or later, and this run generates on a CPU. Set it"):
        check_engine_model(config, model, on_cuda=False)
    with pytest.raises(ConfigError, match="=int8 needs an NVIDIA GPU, and this run generates on"):
        check_engine_model(RolloutConfig(kv_cache_dtype="int8"), model, on_cuda=False)

    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    for capability, passes in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, own=capability: own)
        if passes:
            quantization.check_cache_runner(device)
        else:
            with pytest.raises(ConfigError, match="got A100 of 8.0. Set it to auto"):
                quantization.check_cache_runner(device)


def test_frozen_policies_keep_keys_and_values_whole():
    assert _engine_config(RolloutConfig(kv_cache_dtype="fp8")).kv_cache_dtype == "auto"


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_plan_counts_the_bytes_of_the_pages(ranks: int):
    shape = ModelShape.from_module(make_model("qwen3", torch.float32))
    batch = BatchPlan.of(TrainConfig(), ranks)
    settings: dict[str, Any] = {"dtype": "bfloat16", "tensor_model_parallel_size": ranks}
    planned = []
    for kind in ("auto", "fp8", "int8"):
        config = RolloutConfig(kv_cache_dtype=kind, **settings)
        plan = plan_rollout(
            config, shape, batch, on_cuda=True, aliases=False, ranks=ranks, room=None
        )
        planned.append(plan.page_bytes)
    heads = 2 * 2 // ranks  # of two layers
    small = 16 * heads * (2 * 16 + 2 * 4)
    assert planned == [16 * heads * 2 * 16 * 2, small, small]
