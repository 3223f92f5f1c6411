"""Products of int8 matrices with one scale for each row.

cuBLAS computes them on Hopper at the speed of bfloat16. This kernel is faster because two or three
programs share a multiprocessor: Triton (3.6) waits for each product of integers before the next,
and the others compute meanwhile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from verl.rollout.eight_bits import Rows
from verl.rollout.embedded.kernels import PROCESSORS
from verl.rollout.embedded.kernels.tiles import tile_in_group
from verl.utils.arithmetic import ceil_div, round_up

_COLUMNS = 128  # of a tile
_INNER = 128  # numbers of a row that are loaded at once
_STAGES = 3
_GROUP = 16  # rows of tiles that share weights in the cache
_SHORTEST_SPLIT = 1024
_MOST_SPLITS = 8


class Tile(NamedTuple):
    """Rows of a tile, and the programs with such tiles that a multiprocessor has at once."""

    rows: int
    programs: int


_SMALL = Tile(64, programs=3)
_LARGE = Tile(128, programs=2)
_MOST_SMALL = 320  # rows; 320 are five small tiles, but three large ones


class Plan(NamedTuple):
    """The layout of a product: its tiles, and the parts that K is cut into."""

    tile: Tile
    tiles: int
    splits: int
    split_inner: int


def plan(rows: int, columns: int, inner: int, *, may_split: bool) -> Plan:
    """Choose the layout of an (M, K) x (K, N) product."""
    tile = _SMALL if rows <= _MOST_SMALL else _LARGE
    tiles = ceil_div(rows, tile.rows) * ceil_div(columns, _COLUMNS)
    splits = 1
    if may_split:
        places = tile.programs * PROCESSORS
        splits = max(1, min(_MOST_SPLITS, inner // _SHORTEST_SPLIT, places // tiles))
    split_inner = round_up(ceil_div(inner, splits), _INNER)
    return Plan(tile, tiles, ceil_div(inner, split_inner), split_inner)


def int8_product(
    x: Rows, weight: Rows, bias: Tensor | None, dtype: torch.dtype, *, may_split: bool = False
) -> Tensor:
    """Return x W^T + b (M, N) of x (M, K), W (N, K) and b (N,), rounded once, to `dtype`.

    K is a multiple of 16. With `may_split`, the result may be S parts (S, M, N) in fp32 instead,
    whose sum it is; the bias must be None.
    """
    assert bias is None or not may_split, "a bias would be added S times"
    rows, inner = x.values.shape
    columns = weight.values.shape[0]
    layout = plan(rows, columns, inner, may_split=may_split)
    shape = (rows, columns)
    if layout.splits > 1:
        shape = (layout.splits, rows, columns)
        dtype = torch.float32
    out = torch.empty(shape, dtype=dtype, device=x.values.device)

    tile = layout.tile
    _int8_product[(layout.tiles, layout.splits)](
        _blocks(x.values, tile.rows),
        _blocks(weight.values, _COLUMNS),
        x.scales,
        weight.scales,
        bias,
        out,
        rows,
        columns,
        inner,
        layout.split_inner,
        BLOCK_M=tile.rows,
        BLOCK_N=_COLUMNS,
        BLOCK_K=_INNER,
        GROUP=_GROUP,
        num_warps=4,
        num_stages=_STAGES,
    )
    return out


def _blocks(matrix: Tensor, rows: int) -> TensorDescriptor:
    """Describe a matrix that is loaded in blocks. Numbers outside are zeros."""
    return TensorDescriptor(matrix, [*matrix.shape], [*matrix.stride()], [rows, _INNER])


@triton.jit
def _int8_product(
    X,
    WEIGHT,
    X_SCALES,
    WEIGHT_SCALES,
    BIAS,
    OUT,
    rows,
    columns,
    inner,
    split_inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile_m, tile_n = tile_in_group(
        tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), GROUP
    )
    first_row = tile_m * BLOCK_M
    first_column = tile_n * BLOCK_N

    split = tl.program_id(1)
    start = split * split_inner
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for k in range(start, min(start + split_inner, inner), BLOCK_K):
        a = X.load([first_row, k])
        b = WEIGHT.load([first_column, k])
        total = tl.dot(a, b.T, total, out_dtype=tl.int32)

    row = first_row + tl.arange(0, BLOCK_M)
    column = first_column + tl.arange(0, BLOCK_N)
    real_row = row < rows
    real_column = column < columns
    row_scale = tl.load(X_SCALES + row, mask=real_row, other=0.0)
    column_scale = tl.load(WEIGHT_SCALES + column, mask=real_column, other=0.0)
    wide = total.to(tl.float32) * row_scale[:, None] * column_scale[None, :]
    if BIAS is not None:
        wide += tl.load(BIAS + column, mask=real_column, other=0.0).to(tl.float32)[None, :]
    target = OUT + (split * rows + row).to(tl.int64)[:, None] * columns + column[None, :]
    mask = real_row[:, None] & real_column[None, :]
    tl.store(target, wide.to(OUT.dtype.element_ty), mask=mask)
