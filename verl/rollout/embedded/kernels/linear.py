"""Compute matrix products and sums with rows that do not depend on the other rows of a batch.

A product over K is the sum, in a fixed order, of partial products, each of which runs through its
part of K in one order in fp32. The cuts of K are a function of (N, K) alone. The number of rows M
only chooses where the work runs: the size of a tile, and whether one program or many compute the
partial products of a tile. A tensor core adds the products of one output element in an order that
does not depend on neighbors or tile width, so this changes no bit; the tests on the device compare
every choice bit for bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.rollout.embedded.kernels import PROCESSORS
from verl.rollout.embedded.kernels.tiles import tile_in_group

# A product with fewer output tiles than this leaves processors idle, so its K is cut.
WANTED_TILES = PROCESSORS
# Shorter partial products cost more to add up than they save.
MIN_SPLIT_K = 384
MAX_SPLITS = 8
GROUP_M = 8  # rows of tiles that share weights in the cache
ROW_BLOCK = 4096  # numbers that `row_sum` reads at a time
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tile(NamedTuple):
    """Size and launch settings of one program's tile of the output.

    Hopper's tensor core instruction has 64 rows, so no tile has fewer: with fewer, another
    instruction would be used and the bits could differ.
    """

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


# For few rows: the weight is read once, limited by bandwidth, hence narrow tiles and many loads at
# once.
SMALL = Tile(64, 64, 128, num_warps=4, num_stages=4)
LARGE = Tile(128, 128, 64, num_warps=8, num_stages=4)
# Without a second accumulator for the sum of the splits there are registers for a wider tile.
WIDE = Tile(128, 256, 64, num_warps=8, num_stages=3)
# fp32 without TF32 runs on the ordinary cores.
SMALL_FP32 = Tile(64, 64, 32, num_warps=4, num_stages=3)


class Plan(NamedTuple):
    """The layout of a product: `splits` and `split_k` decide its bits, the rest where it runs."""

    tile: Tile
    splits: int
    split_k: int
    in_grid: bool  # one program a split, whose partial products a second kernel adds up


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute x W^T + b in fp32; the bits of a row depend on that row, W and b alone.

    x (M, K) with contiguous rows at any distance, weight (N, K) with any strides (a transposed (K,
    N) is fine), bias (N,), all bf16, fp16 or fp32 (without TF32) -> `out` (M, N), rows contiguous.
    If `out` is not given, it is allocated in `out_dtype` or the dtype of x.
    """
    assert x.ndim == weight.ndim == 2, (x.shape, weight.shape)
    assert x.shape[1] == weight.shape[1], (x.shape, weight.shape)
    assert x.dtype == weight.dtype, (x.dtype, weight.dtype)
    assert x.dtype in DTYPES, x.dtype
    assert bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous())
    rows = x.shape[0]
    columns = weight.shape[0]
    if x.stride(1) != 1:
        x = x.contiguous()
    if out is None:
        out = x.new_empty(rows, columns, dtype=out_dtype or x.dtype)

    assert out.shape == (rows, columns), (out.shape, rows, columns)
    assert out.stride(1) == 1, out.stride()
    if rows:
        _launch(x, weight, bias, out, plan(rows, columns, x.shape[1], x.dtype))
    return out


def plan(rows: int, columns: int, inner: int, dtype: torch.dtype) -> Plan:
    """Choose the layout of an (M, K) x (K, N) product."""
    small = SMALL_FP32 if dtype == torch.float32 else SMALL
    splits, split_k = _splits(columns, inner)
    if triton.cdiv(rows, small.m) * triton.cdiv(columns, small.n) < WANTED_TILES and splits > 1:
        return Plan(small, splits, split_k, in_grid=True)
    tile = small
    if dtype != torch.float32 and rows > small.m:
        for larger in (LARGE, WIDE) if splits == 1 else (LARGE,):
            if triton.cdiv(rows, larger.m) * triton.cdiv(columns, larger.n) >= WANTED_TILES:
                tile = larger
    return Plan(tile, splits, split_k, in_grid=False)


def _splits(columns: int, inner: int) -> tuple[int, int]:
    """Return number and length of the partial products over K, from (N, K) alone."""
    wanted = min(
        MAX_SPLITS,
        triton.cdiv(WANTED_TILES, triton.cdiv(columns, SMALL.n)),
        max(1, inner // MIN_SPLIT_K),
    )
    # Whole blocks of every tile, so that a split ends where a block ends.
    split_k = triton.cdiv(triton.cdiv(inner, wanted), SMALL.k) * SMALL.k
    return triton.cdiv(inner, split_k), split_k


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, plan: Plan) -> None:
    rows, inner = x.shape
    columns = weight.shape[0]
    tile = plan.tile
    tiles = triton.cdiv(rows, tile.m) * triton.cdiv(columns, tile.n)
    target = out
    grid = (tiles, 1)

    if plan.in_grid:
        target = torch.empty(plan.splits, rows, columns, dtype=torch.float32, device=x.device)
        grid = (tiles, plan.splits)

    _linear_kernel[grid](
        x,
        weight,
        bias,
        target,
        rows,
        columns,
        inner,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        target.stride(-2),
        SPLITS=plan.splits,
        SPLIT_K=plan.split_k,
        IN_GRID=plan.in_grid,
        EVEN_K=inner % tile.k == 0,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        GROUP=GROUP_M,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )

    if plan.in_grid:
        _add_splits_kernel[(triton.cdiv(columns, 256), rows)](
            target,
            bias,
            out,
            rows,
            columns,
            out.stride(0),
            SPLITS=plan.splits,
            BLOCK=256,
            num_warps=2,
        )


# One binary for every M: a specialised one for M = 1 could order its arithmetic in another way.
@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    columns,
    inner,
    x_stride,
    weight_stride_n,
    weight_stride_k,
    out_stride,
    SPLITS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    IN_GRID: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    tile_m, tile_n = tile_in_group(tl.program_id(0), tiles_m, tiles_n, GROUP)

    row = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    x += row[:, None] * x_stride
    weight += column[None, :] * weight_stride_n
    real_row = row[:, None] < rows
    real_column = column[None, :] < columns
    start = 0
    stop = inner
    if IN_GRID:
        split = tl.program_id(1)
        start = split * SPLIT_K
        stop = min((split + 1) * SPLIT_K, inner)

    if IN_GRID or SPLITS == 1:
        result = _partial(
            x,
            weight,
            real_row,
            real_column,
            start,
            stop,
            inner,
            weight_stride_k,
            EVEN_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
    else:
        result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for split in range(SPLITS):
            result += _partial(
                x,
                weight,
                real_row,
                real_column,
                split * SPLIT_K,
                min((split + 1) * SPLIT_K, inner),
                inner,
                weight_stride_k,
                EVEN_K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )

    if IN_GRID:
        out += split.to(tl.int64) * rows * columns
    elif bias is not None:
        result += tl.load(bias + column, column < columns, other=0.0)[None, :].to(tl.float32)
    out += row[:, None] * out_stride + column[None, :]
    tl.store(out, result.to(out.dtype.element_ty), real_row & real_column)


@triton.jit
def _partial(
    x,
    weight,
    real_row,
    real_column,
    start,
    stop,
    inner,
    weight_stride_k,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sum over K from `start` to `stop`, in ascending order: (BLOCK_M, BLOCK_N) in fp32."""
    result = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(start, stop, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        mask_x = real_row
        mask_weight = real_column
        if not EVEN_K:
            mask_x = real_row & (k[None, :] < inner)
            mask_weight = real_column & (k[:, None] < inner)
        a = tl.load(x + k[None, :], mask_x, other=0.0)
        b = tl.load(weight + k.to(tl.int64)[:, None] * weight_stride_k, mask_weight, other=0.0)
        result = tl.dot(a, b, result, input_precision="ieee")
    return result


@triton.jit(do_not_specialize=["rows"])
def _add_splits_kernel(
    partials,
    bias,
    out,
    rows,
    columns,
    out_stride,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up partials (SPLITS, rows, columns) and the bias to out (rows, columns).

    The order is that of a single program.
    """
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = column < columns
    result = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        result += tl.load(partials + (split * rows + row) * columns + column, real, other=0.0)
    if bias is not None:
        result += tl.load(bias + column, real, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + column, result.to(out.dtype.element_ty), real)


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, (..., K) -> (...) in fp32, each by one program in one order.

    torch picks the order of such a sum on CUDA by the number of rows.
    """
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    out = torch.empty(flat.shape[0], dtype=torch.float32, device=x.device)
    if flat.shape[0]:
        block = min(ROW_BLOCK, triton.next_power_of_2(flat.shape[1]))
        _row_sum_kernel[(flat.shape[0],)](
            flat, out, flat.shape[1], flat.stride(0), BLOCK=block, num_warps=4
        )
    return out.view(x.shape[:-1])


@triton.jit
def _row_sum_kernel(x, out, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        sums += tl.load(x + row * stride + first + column, first + column < columns, other=0.0).to(
            tl.float32
        )
    tl.store(out + row, tl.sum(sums))
