"""The compiled attention kernels against fp32 attention in torch, at the sizes of real models."""

import importlib
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
PAGE_SIZE = 16
SHAPES = [
    (14, 2, 64),
    (32, 32, 80),
    (16, 4, 96),
    (12, 2, 128),
    (28, 4, 128),
    (8, 4, 256),
    (71, 1, 64),
    (4, 4, 16),
]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """Import them when a test runs: collecting this file must not need Triton."""
    return importlib.import_module("verl.rollout.embedded.kernels.paged_attention")


def make_workspace(rows: int, heads: int, value_dim: int, num_splits: int) -> Any:
    launch = importlib.import_module("verl.rollout.embedded.kernels.decode_launch")
    return launch.split_workspace(rows, heads, value_dim, num_splits, "cuda")


class Batch(NamedTuple):
    q: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    slots: Tensor
    positions: Tensor


def make_batch(
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int | None = None,
    longest: int = 700,
    dtype: torch.dtype = torch.bfloat16,
) -> Batch:
    """Build a batch with pages between those of another layer, unordered slots, and q as a view.

    q is a view of a projection of q, k and v. Memory without tokens is NaN.
    """
    value_dim = value_dim or dim
    torch.manual_seed(rows + heads + dim)
    with torch.device("cuda"):
        slots = torch.randperm(rows + 3)[:rows].int()
        positions = torch.randint(longest, (rows + 3,), dtype=torch.int32)
        positions[slots[0]] = longest - 1
        positions[slots[-1]] = 0
        width = -(-longest // PAGE_SIZE)
        table = torch.randperm((rows + 3) * width).view(rows + 3, width).int()
        token = torch.arange(width * PAGE_SIZE)
        empty = (token > positions[:, None]).view(rows + 3, width, PAGE_SIZE)
        caches = []
        for size in (dim, value_dim):
            cache = torch.randn(table.numel(), 2, kv_heads, PAGE_SIZE, size, dtype=dtype)[:, 1]
            cache[table.flatten().long()] = cache[table.flatten().long()].masked_fill(
                empty.flatten(0, 1)[:, None, :, None], float("nan")
            )
            caches.append(cache)
        projected = 2 * torch.randn(rows, heads * dim + 2 * kv_heads * dim, dtype=dtype)

    (keys, values), q = caches, projected[:, : heads * dim].unflatten(1, (heads, dim))
    return Batch(q, keys, values, table, slots, positions)


def expected(
    batch: Batch, window: int | None = None, cap: float | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Return the result (b, Hq, Dv) in fp32."""
    q = batch.q.float()
    slots = batch.slots.long()
    pages = batch.table[slots].long()
    position = batch.positions[slots][:, None]
    k, v = (
        c[pages].transpose(2, 3).flatten(1, 2).float().nan_to_num()
        for c in (batch.keys, batch.values)
    )

    k, v = (c.repeat_interleave(q.shape[1] // c.shape[2], dim=2) for c in (k, v))
    scores = torch.einsum("bhd,blhd->bhl", q, k) * q.shape[2] ** -0.5
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    token = torch.arange(k.shape[1], device="cuda")
    visible = token <= position
    if window is not None:
        visible &= token > position - window

    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None].expand(len(q), -1, 1)], dim=2)
    return torch.einsum("bhl,blhd->bhd", scores.softmax(-1)[..., : k.shape[1]], v)


def attend(kernels: ModuleType, batch: Batch, **settings: Any) -> Tensor:
    rows, heads, dim = batch.q.shape
    value_dim = batch.values.shape[-1]
    out = torch.full((rows, heads, value_dim), float("nan"), dtype=batch.q.dtype, device="cuda")
    workspace = make_workspace(rows, heads, value_dim, 64)
    for memory in (workspace.out, workspace.lse):
        memory.fill_(float("nan"))
    kernels.decode_attention(*batch, out, scale=dim**-0.5, workspace=workspace, **settings)
    return out


def relative_l2(one: Tensor, other: Tensor) -> float:
    return ((one.float() - other).norm() / other.norm()).item()


def features_of(name: str, heads: int) -> dict[str, Any]:
    sinks = torch.linspace(-2, 5, heads, device="cuda")
    return {
        "plain": {},
        "window": {"window": 200},
        "cap": {"cap": 3.0},
        "sinks": {"sinks": sinks},
        "all": {"window": 130, "cap": 4.0, "sinks": sinks},
    }[name]


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        *((shape, name) for shape in SHAPES for name in ("plain", "all")),
        *(((12, 2, 128), name) for name in ("window", "cap", "sinks")),
    ],
)
def test_bf16(kernels, shape: tuple[int, int, int], name: str):
    heads, kv_heads, dim = shape
    batch = make_batch(19, heads, kv_heads, dim)
    features = features_of(name, heads)
    truth = expected(batch, **features)
    for splits in ({}, {"num_splits": 5}, {"num_splits": 64}, {"split_tokens": 256}):
        assert relative_l2(attend(kernels, batch, **features, **splits), truth) < 5e-3, splits
    if features:
        assert relative_l2(expected(batch), truth) > 0.05


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_fp32_is_not_rounded_to_tf32(kernels, dim: int):
    batch = make_batch(7, 12, 4, dim, dtype=torch.float32)
    features = features_of("all", 12)
    for splits in ({}, {"num_splits": 5}):
        assert (
            relative_l2(attend(kernels, batch, **features, **splits), expected(batch, **features))
            < 1e-5
        )


def test_fp16_and_a_separate_value_size(kernels):
    batch = make_batch(9, 12, 4, 128, value_dim=96, dtype=torch.float16)
    assert relative_l2(attend(kernels, batch, num_splits=3), expected(batch)) < 1e-3


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(14, 2, 64), (12, 2, 128), (8, 4, 256)])
def test_fixed_splits_give_a_row_the_same_bits_in_every_batch(
    kernels, heads, kv_heads, dim, window
):
    batch = make_batch(300, heads, kv_heads, dim)
    fixed = {"window": window, "split_tokens": 128}
    crowd = attend(kernels, batch, **fixed)
    order = torch.randperm(300, device="cuda")
    moved = batch._replace(q=batch.q[order], slots=batch.slots[order])
    assert torch.equal(attend(kernels, moved, **fixed), crowd[order])
    wider = batch._replace(table=torch.cat([batch.table, batch.table], dim=1))
    assert torch.equal(attend(kernels, wider, **fixed), crowd)

    for row in (0, 7, 299):
        alone = batch._replace(
            q=batch.q[row : row + 1].clone(), slots=batch.slots[row : row + 1].clone()
        )
        assert torch.equal(attend(kernels, alone, **fixed)[0], crowd[row])

    assert not torch.equal(attend(kernels, batch, window=window, num_splits=3), crowd), (
        "any splits would do"
    )


@pytest.mark.parametrize(
    ("shape", "normed"),
    [((14, 2, 64), False), ((16, 4, 96), False), ((12, 2, 128), True), ((8, 4, 256), True)],
)
def test_a_fresh_token_is_rotated_and_stored_like_by_its_own_kernel(
    kernels, shape: tuple[int, int, int], normed: bool
):
    rotary = importlib.import_module("verl.rollout.embedded.kernels.rope_store")
    heads, kv_heads, dim = shape
    batch = make_batch(19, heads, kv_heads, dim)
    slots = batch.slots.long()
    positions = batch.positions[slots].long()
    pages = batch.table[slots, positions // PAGE_SIZE].long()
    offsets = positions % PAGE_SIZE

    with torch.device("cuda"):
        cos, sin = (table.repeat(1, 2).bfloat16() for table in torch.randn(2, 700, dim // 2))
        qkv = torch.randn(19, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
        norms = tuple(torch.rand(dim).bfloat16() for _ in range(2)) if normed else (None, None)

    truth = batch._replace(keys=batch.keys.clone(), values=batch.values.clone())
    turned = qkv.clone()
    rotary.rope_store(
        turned,
        cos,
        sin,
        positions,
        pages,
        offsets,
        truth.keys,
        truth.values,
        query_norm=norms[0],
        key_norm=norms[1],
        eps=1e-6,
    )

    truth, (q, k, v) = (
        truth._replace(q=turned.unflatten(1, (-1, dim))[:, :heads]),
        qkv.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1),
    )
    for splits in ({}, {"num_splits": 5}, {"split_tokens": 256}):
        for cache in (batch.keys, batch.values):
            cache[pages, :, offsets] = float("nan")
        fresh = kernels.Fresh(k, v, cos, sin, *norms, 1e-6)
        assert (
            relative_l2(
                attend(kernels, batch._replace(q=q), fresh=fresh, **splits), expected(truth)
            )
            < 5e-3
        ), splits
        assert relative_l2(batch.keys.nan_to_num(), truth.keys.float().nan_to_num()) < 1e-3
        assert torch.equal(batch.values.nan_to_num(), truth.values.nan_to_num())


def test_a_graph_follows_its_tensors(kernels):
    """Capture at one state of the batch and replay at another: the host reads and allocates
    nothing."""
    batch = make_batch(48, 12, 2, 128)
    for cache in (batch.keys, batch.values):
        cache.nan_to_num_(nan=0.5)  # pages change owners
    workspace = make_workspace(48, 12, 128, 3)
    out = torch.zeros(48, 12, 128, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        kernels.decode_attention(
            *batch, out, scale=128**-0.5, num_splits=3, workspace=workspace, window=400
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    batch.q.copy_(2 * torch.randn_like(batch.q))
    batch.slots.copy_(batch.slots.flip(0))
    batch.positions.copy_(torch.randint_like(batch.positions, 700))
    batch.table.copy_(batch.table[torch.randperm(51, device="cuda")])
    graph.replay()
    assert relative_l2(out, expected(batch, window=400)) < 5e-3


def test_offsets_beyond_32_bits(kernels):
    """Use pages with first elements from the 4,000,000,000th of the cache on."""
    batch = make_batch(5, 12, 2, 128)
    stride = 2 * 16 * 128 * 5000
    big = [torch.empty(240 * stride, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    assert big[0].numel() > 2**32
    used = batch.table[batch.slots.long()].long()
    pages = used[:, : 240 // 5].flatten()
    caches = []

    for memory, cache in zip(big, (batch.keys, batch.values)):
        view = memory.view(240, stride)[:, : 2 * 16 * 128].unflatten(1, (2, 16, 128))
        view[: len(pages)] = cache[pages]
        caches.append(view)

    table = torch.arange(len(pages), dtype=torch.int32, device="cuda").view(5, -1)
    batch = batch._replace(
        keys=caches[0],
        values=caches[1],
        table=table,
        slots=torch.arange(5, dtype=torch.int32, device="cuda"),
        positions=batch.positions[batch.slots.long()],
    )

    assert relative_l2(attend(kernels, batch, num_splits=2), expected(batch)) < 5e-3
