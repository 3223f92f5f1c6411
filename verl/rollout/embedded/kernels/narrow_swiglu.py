"""SwiGLU of few rows within the products of gate and up, which take the time of reading the weight.

cuBLAS has tiles for many rows. Here the weight takes the tensor cores' 64 rows, so 16 rows of x are
no more work than they need.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.rollout.embedded.kernels import PROCESSORS
from verl.rollout.embedded.kernels.layers import gated
from verl.rollout.embedded.kernels.shared_memory import shared_memory
from verl.utils.arithmetic import ceil_div

# With more rows, cuBLAS is as fast: its tiles read a weight once for 128 rows.
MOST_ROWS = 64
_COLUMNS = 64  # of a tile
_INNER = 64  # numbers of a row that are loaded at once
# Loads ahead, by the programs that share a multiprocessor and its memory; with more, the last.
_STAGES = (6, 4, 3)
_SHARED_BYTES = _STAGES[0] * (MOST_ROWS + 2 * _COLUMNS) * _INNER * 2  # of 16-bit numbers


def can_gate(rows: int, inner: int, device: torch.device) -> bool:
    """Return whether `gated_product` computes x (M, K) on `device`."""
    has_room = shared_memory(device) >= _SHARED_BYTES
    return rows <= MOST_ROWS and inner % _INNER == 0 and has_room


def gated_product(x: Tensor, weight: Tensor, *, gelu: bool = False) -> Tensor:
    """Compute silu(x G^T) * (x U^T) (M, I) of x (M, K) and `weight` (2 I, K), G above U.

    Shazeer 2020, equation 6; both products are rounded first. `gelu`: with the tanh approximation
    of GELU for SiLU. See `can_gate` for the sizes.
    """
    rows, inner = x.shape
    columns = weight.shape[0] // 2
    assert can_gate(rows, inner, x.device), (rows, inner)
    assert x.is_contiguous(), x.stride()
    assert weight.is_contiguous(), weight.stride()

    out = x.new_empty(rows, columns)
    tiles = ceil_div(columns, _COLUMNS)
    shared_by = min(ceil_div(tiles, PROCESSORS), len(_STAGES))
    _gated_product[(tiles,)](
        x,
        weight,
        out,
        rows,
        columns,
        inner,
        GELU=gelu,
        BLOCK_M=max(16, triton.next_power_of_2(rows)),
        BLOCK_N=_COLUMNS,
        BLOCK_K=_INNER,
        num_warps=4,
        num_stages=_STAGES[shared_by - 1],
    )
    return out


@triton.jit
def _gated_product(
    X,
    WEIGHT,
    OUT,
    rows,
    columns,
    inner,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns outside are copies of the first and are not stored: loads without masks take
    # fewer instructions.
    held_row = tl.where(row < rows, row, 0)
    held_column = tl.where(column < columns, column, 0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x = X + held_row[None, :] * inner + k[:, None]
    gate_weight = WEIGHT + held_column[:, None] * inner + k[None, :]
    up_weight = gate_weight + columns.to(tl.int64) * inner

    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in range(0, inner, BLOCK_K):
        block = tl.load(x + first)
        gate = tl.dot(tl.load(gate_weight + first), block, gate)
        up = tl.dot(tl.load(up_weight + first), block, up)

    dtype = OUT.dtype.element_ty
    active = gated(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), GELU)
    target = OUT + row[None, :] * columns + column[:, None]
    mask = (row[None, :] < rows) & (column[:, None] < columns)
    tl.store(target, active.to(dtype), mask=mask)
