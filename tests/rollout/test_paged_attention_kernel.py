"""The attention kernels, interpreted on the CPU and compared with plain attention; tests/gpu has
real sizes."""

import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import cases
from tests.rollout.interpreter import interpreted
from verl.rollout.embedded.kernels import decode_launch
from verl.rollout.embedded.kernels import paged_attention as kernels

KV_HEADS = 2
GROUP = 3
DIM = 24
HEADS = KV_HEADS * GROUP
SCALE = 0.4
SINKS = (0.5, -1.0, 2.0, 0.0, 3.0, 1.0)
POSITIONS = (0, 7, 8, 47, 36, 33)
SLOTS = (3, 0, 5, 1, 3)


class Batch(NamedTuple):
    q: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    slots: Tensor
    positions: Tensor


def make_batch(
    dtype: torch.dtype = torch.float32,
    value_dim: int = DIM,
    page_size: int = 8,
    positions: tuple[int, ...] = POSITIONS,
    group: int = GROUP,
) -> Batch:
    """Build a batch of rows of `SLOTS`, one of them twice.

    Memory without tokens is NaN; no tensor is contiguous.
    """
    generator = torch.Generator().manual_seed(0)
    width = max(positions) // page_size + 1
    table = torch.randperm(len(positions) * width, generator=generator).view(-1, width).int()
    caches = []

    for dim in (DIM, value_dim):
        cache = torch.full(
            (table.numel() + 3, 2, KV_HEADS, page_size, dim), float("nan"), dtype=dtype
        )[:, 1]
        for pages, position in zip(table, positions):
            for token in range(position + 1):
                new = torch.randn(KV_HEADS, dim, generator=generator)
                cache[pages[token // page_size], :, token % page_size] = new.to(dtype)
        caches.append(cache)

    width = KV_HEADS * group * DIM
    q = torch.randn(len(SLOTS), width + 5, generator=generator).to(dtype)[:, :width]
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    q, (keys, values) = q.unflatten(1, (-1, DIM)), caches
    return Batch(q, keys, values, table, slots, torch.tensor(positions, dtype=torch.int32))


def rows_of(batch: Batch, rows: list[int]) -> Batch:
    return batch._replace(q=batch.q[rows].clone(), slots=batch.slots[rows])


def attend(batch: Batch, sinks: bool = False, **settings: Any) -> Tensor:
    value_dim = batch.values.shape[-1]
    out = torch.full((*batch.q.shape[:2], value_dim), float("nan"), dtype=batch.q.dtype)
    # as in a wider layer
    workspace = decode_launch.split_workspace(len(out), out.shape[1], value_dim + 8, 32, "cpu")
    for memory in (workspace.out, workspace.lse):
        memory.fill_(float("nan"))
    kernels.decode_attention(
        *batch,
        out,
        scale=SCALE,
        sinks=torch.tensor(SINKS) if sinks else None,
        workspace=workspace,
        **{"config": decode_launch.DecodeConfig(16, 4, 2)} | settings,
    )

    assert not workspace.arrived.any(), "the next layer would count on"
    return out


def expected(
    batch: Batch, window: int | None = None, cap: float | None = None, sinks: bool = False
) -> Tensor:
    outputs = []
    group = batch.q.shape[1] // KV_HEADS
    for q, slot in zip(batch.q.float(), batch.slots.tolist()):
        pages = batch.table[slot].long()
        length = int(batch.positions[slot]) + 1
        k, v = (
            c[pages].transpose(1, 2).flatten(0, 1)[:length].float()
            for c in (batch.keys, batch.values)
        )
        k, v = (c[-window:] if window else c for c in (k, v))
        k, v = (c.repeat_interleave(group, dim=1) for c in (k, v))
        scores = torch.einsum("hd,lhd->hl", q, k) * SCALE
        if cap:
            scores = cap * torch.tanh(scores / cap)
        if sinks:
            scores = torch.cat([scores, torch.tensor(SINKS)[:, None]], dim=1)
        outputs.append(torch.einsum("hl,lhd->hd", scores.softmax(-1)[:, : len(v)], v))

    return torch.stack(outputs)


def assert_near(one: Tensor, other: Tensor, tolerance: float = 5e-6) -> None:
    torch.testing.assert_close(one.float(), other, rtol=0, atol=tolerance)


FEATURES = [
    {},
    {"window": 11},
    {"cap": 2.0},
    {"sinks": True},
    {"window": 5, "cap": 1.0, "sinks": True},
]


@pytest.mark.parametrize(
    ("features", "splits"),
    [
        *((features, {"num_splits": 3}) for features in FEATURES),
        *((features, {}) for features in FEATURES[::4]),
        *((features, {"split_tokens": 16}) for features in FEATURES[::4]),
    ],
)
@interpreted
def test_a_row_attends_to_its_pages(features: dict[str, Any], splits: dict[str, Any]):
    batch = make_batch()
    assert_near(attend(batch, **features, **splits), expected(batch, **features))
    if features:  # a kernel without the feature would be far off
        assert (expected(batch, **features) - expected(batch)).abs().max() > 0.1


@pytest.mark.parametrize("splits", [{"num_splits": 32}, {"split_tokens": 16}])
@interpreted
def test_more_splits_than_are_merged_at_a_time(splits: dict[str, Any]):
    batch = rows_of(make_batch(positions=(0, 7, 8, 299)), [0, 3])
    # the largest weight comes last, after much has been summed
    batch.keys[batch.table[3, -2:].long()] *= 3
    assert_near(attend(batch, **splits), expected(batch))


@pytest.mark.parametrize("page_size", [16, 32])
@interpreted
def test_pages_can_be_as_large_as_blocks_and_larger(page_size: int):
    batch = make_batch(page_size=page_size)
    assert_near(attend(batch, num_splits=2), expected(batch))


@interpreted
def test_half_precision_and_a_separate_value_size():
    batch = make_batch(torch.float16, value_dim=16)
    assert_near(attend(batch, num_splits=2), expected(batch), 2e-3)


BY_WARPS = decode_launch.DecodeConfig(32, 2, 2, max_registers=168)


@pytest.mark.parametrize(
    ("features", "splits", "page_size", "group"),
    cases(
        [*FEATURES[:3], FEATURES[4]],
        [{}, {"num_splits": 3}, {"split_tokens": 32}],
        [8, 16, 32],  # a warp's 16 keys in two pages, in one, in half of one
        [GROUP, 9],
        quick=lambda features, splits, page_size, group: (
            len(features) != 1 and (page_size == 16) != (group == GROUP)
        ),
    ),
)
@interpreted
def test_warps_have_softmaxes_of_their_own(
    features: dict[str, Any], splits: dict[str, Any], page_size: int, group: int
):
    if group != GROUP:
        features = {name: value for name, value in features.items() if name != "sinks"}
    batch = make_batch(torch.float16, page_size=page_size, group=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "weigh_pages", None)  # with it, warps would share their blocks
        out = attend(batch, config=BY_WARPS, **features, **splits)
    assert_near(out, expected(batch, **features), 4e-3)


@pytest.mark.parametrize("window", [None, 27])
@interpreted
def test_fixed_splits_give_a_row_the_same_bits_in_every_batch(window: int | None):
    batch = make_batch()
    fixed: dict[str, Any] = {"window": window, "split_tokens": 32}
    crowd = attend(batch, **fixed)
    assert torch.equal(attend(rows_of(batch, [3, 0]), **fixed), crowd[[3, 0]])
    wider = batch._replace(table=torch.cat([batch.table, batch.table], dim=1))
    assert torch.equal(attend(rows_of(wider, [0]), **fixed)[0], crowd[0])
    assert not torch.equal(attend(rows_of(batch, [0]), window=window)[0], crowd[0]), (
        "any splits would do"
    )


def take_out_newest(batch: Batch, normed: bool) -> tuple[Batch, kernels.Fresh]:
    """Return the batch before its newest keys are rotated and stored, and the pending work."""
    generator = torch.Generator().manual_seed(1)
    rows = len(batch.slots)
    slots = batch.slots.long()
    angles = torch.randn(int(batch.positions.max()) + 1, DIM // 2, generator=generator)
    cos, sin = (torch.cat([table, table], dim=1) for table in (angles.cos(), angles.sin()))
    qkv = torch.randn(rows, HEADS + 2 * KV_HEADS, DIM, generator=generator)
    norms = (
        tuple(torch.rand(DIM, generator=generator) + 0.5 for _ in range(2))
        if normed
        else (None, None)
    )
    dtype = batch.keys.dtype
    qkv, cos, sin = (numbers.to(dtype) for numbers in (qkv, cos, sin))
    norms = tuple(norm if norm is None else norm.to(dtype) for norm in norms)

    for slot in slots.tolist():
        position = int(batch.positions[slot])
        page_size = batch.keys.shape[2]
        for cache in (batch.keys, batch.values):
            cache[int(batch.table[slot, position // page_size]), :, position % page_size] = float(
                "nan"
            )

    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    return batch._replace(q=q), kernels.Fresh(k, v, cos, sin, *norms, 1e-6)


def store_newest(batch: Batch, fresh: kernels.Fresh) -> Batch:
    """Rotate and store `fresh` in plain operations. Returns the batch with rotated queries."""
    positions = batch.positions[batch.slots.long()].long()
    cos = fresh.cos[positions][:, None]
    sin = fresh.sin[positions][:, None]

    def turned(heads: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            heads = F.rms_norm(heads, (DIM,), norm, fresh.eps)
        low, high = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat([-high, low], dim=-1) * sin

    page_size = batch.keys.shape[2]
    pages = batch.table[batch.slots.long(), positions // page_size].long()
    batch.keys[pages, :, positions % page_size] = turned(fresh.keys, fresh.key_norm)
    batch.values[pages, :, positions % page_size] = fresh.values
    return batch._replace(q=turned(batch.q, fresh.query_norm))


@pytest.mark.parametrize(
    ("normed", "features", "splits"),
    cases(
        [False, True],
        [{}, {"window": 1}, {"window": 5, "cap": 1.0, "sinks": True}],
        [{}, {"num_splits": 3}, {"split_tokens": 16}],
        quick=lambda normed, features, splits: normed == bool(splits) or "num_splits" in splits,
    ),
)
@interpreted
def test_a_fresh_token_is_rotated_stored_and_seen(
    features: dict[str, Any], splits: dict[str, Any], normed: bool
):
    batch, fresh = take_out_newest(rows_of(make_batch(), [0, 1, 2, 3]), normed)
    truth = store_newest(
        batch._replace(keys=batch.keys.clone(), values=batch.values.clone()), fresh
    )
    assert_near(attend(batch, **features, **splits, fresh=fresh), expected(truth, **features))
    for cache, wanted in ((batch.keys, truth.keys), (batch.values, truth.values)):
        torch.testing.assert_close(cache, wanted, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("splits", [{}, {"num_splits": 3}, {"split_tokens": 32}])
@interpreted
def test_warps_see_a_fresh_token(splits: dict[str, Any]):
    half = make_batch(torch.float16, page_size=16)
    batch, fresh = take_out_newest(rows_of(half, [0, 1, 2, 3]), normed=True)
    truth = store_newest(
        batch._replace(keys=batch.keys.clone(), values=batch.values.clone()), fresh
    )
    out = attend(batch, **splits, fresh=fresh, config=BY_WARPS)
    assert_near(out, expected(truth), 8e-3)
    for cache, wanted in ((batch.keys, truth.keys), (batch.values, truth.values)):
        torch.testing.assert_close(cache, wanted, rtol=0, atol=4e-3, equal_nan=True)


@interpreted
def test_a_row_without_keys_gives_zero():
    batch = make_batch()
    batch.positions[3] = -1
    batch = rows_of(batch, [0, 1, 4])
    cases: list[dict[str, Any]] = [
        {},
        {"num_splits": 3},
        {"split_tokens": 16},
        {"num_splits": 3, "sinks": True},
    ]
    for splits in cases:
        out = attend(batch, **splits)
        assert (out[[0, 2]] == 0).all(), splits
        assert (out[1] != 0).all(), splits


@pytest.mark.parametrize(("widest", "eight_bits"), [(128, False), (256, False), (256, True)])
def test_splits_fill_the_device(widest, eight_bits):
    for rows in range(1, 2000, 7):
        for kv_heads in (1, 2, 8):
            splits = decode_launch.choose_num_splits(
                rows, kv_heads, 132, widest=widest, eight_bits=eight_bits
            )
            assert splits == 1 or rows * kv_heads * splits <= 2 * 132
            assert rows * kv_heads * splits >= 132 or splits == 32


def test_splits_of_eight_bits_give_each_multiprocessor_three_to_five_programs():
    for programs in range(1, 2000):
        splits = decode_launch.choose_num_splits(programs, 1, 132, widest=128, eight_bits=True)
        assert splits in (1, 32) or 3 * 132 <= programs * splits <= 5 * 132
        assert splits > 1 or 2 * programs > 5 * 132


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_blocks_depend_on_the_batch_only_where_bits_may(dim):
    fixed = decode_launch.decode_config(dim, dim, torch.bfloat16)
    found = {
        decode_launch.decode_config(dim, dim, torch.bfloat16, programs=programs)
        for programs in (1, 396, 397, 792, 793, 5000)
    }
    assert fixed in found
    assert len(found) == (1 if dim == 256 else 2)


def test_fixed_splits_cover_every_window():
    for window in range(1, 70):
        most = max(
            position // 16 - max(0, position - window + 1) // 16 + 1 for position in range(64)
        )
        assert decode_launch.fixed_num_splits(8, 8, 16, window) == most
    assert decode_launch.fixed_num_splits(8, 8, 16) == 4


@pytest.mark.slow
def test_verl_is_imported_without_triton():
    code = "import sys; sys.modules['triton'] = None; import verl.rollout"
    subprocess.run([sys.executable, "-c", code], check=True)
