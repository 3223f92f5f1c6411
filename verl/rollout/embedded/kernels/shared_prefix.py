"""Attention of rows that share the pages of a prompt, which are read once for many rows.

A program takes a block of rows with all query heads of one key head, so the tensor cores multiply 64
queries at a time where a row alone has a few. It leaves a partial result for each query, and
attention over the rest of the row takes that up at its end. On Hopper the rest runs at the same
time. One after the other, both gained less, or lost: for 576 rows with a prompt of 256 tokens and
251 of their own (1.5B), a layer took 59 us, and 57 without blocks.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from verl.rollout.embedded.kernels.decode_launch import padded
from verl.rollout.embedded.kernels.page_blocks import weigh_pages
from verl.rollout.embedded.kernels.running_softmax import finite, store_mean
from verl.rollout.embedded.kernels.shared_memory import shared_memory

BLOCK_ROWS = 8  # the most rows of a block
FEWEST_ROWS = 4
_MOST_QUERIES = 128  # of a program
_BLOCK_KEYS = 64  # that are loaded at once, of _STAGES - 1 blocks ahead
_STAGES = 3


class SharedPrefixes(NamedTuple):
    """Blocks of rows that share pages.

    Rows [rows[i], rows[i] + counts[i]) share the pages of their first tokens[i] tokens, which are
    full. A block of 0 rows is skipped.
    """

    rows: Tensor  # (n,) int32; n is `most_blocks` of b
    counts: Tensor  # (n,) int32, up to BLOCK_ROWS
    tokens: Tensor  # (n,) int32
    covered: Tensor  # (b,) int32, the tokens of each row's block; 0: the row is in none

    @classmethod
    def allocate(cls, rows: int, device: torch.device | str) -> tuple["SharedPrefixes", Tensor]:
        """Return no blocks for `rows` rows, and the tensor in which all fields are, in order."""
        sizes = [*3 * [most_blocks(rows)], rows]
        flat = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        return cls(*flat.split(sizes)), flat

    def of(self, rows: int) -> "SharedPrefixes":
        """Return the blocks of the first `rows` rows, which have no others."""
        blocks = (tensor[: most_blocks(rows)] for tensor in self[:3])
        return SharedPrefixes(*blocks, self.covered[:rows])


class PartialResults(NamedTuple):
    """fp32 outputs (b, Hq, Dv) and log2 of the softmax denominators (b, Hq) of shared tokens."""

    out: Tensor
    lse: Tensor


def most_blocks(rows: int) -> int:
    """Return how many blocks `rows` rows can have. A kernel needs one program or more."""
    return max(1, rows // FEWEST_ROWS)


@cache
def can_share(group: int, widest: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether blocks have registers and shared memory for `group` query heads a key head.

    `widest` is the larger size of a key or value, `dtype` that of queries. fp32 has 223 spills with
    heads of 128; heads of 256 have none in bfloat16, but were not measured.
    """
    if _queries(group) > _MOST_QUERIES or widest > 128 or dtype == torch.float32:
        return False
    # The tensor cores of Hopper and of data-center Blackwell read shared memory themselves.
    is_recent = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
    needed = program_bytes(_queries(group), widest, from_shared_memory=is_recent)
    return needed <= shared_memory(device)


def program_bytes(queries: int, widest: int, *, from_shared_memory: bool) -> int:
    """Return the bytes of shared memory that a program of 16-bit `queries` takes at most.

    Where products read their operands `from_shared_memory`, one more block of keys and values is
    there.
    """
    blocks = _STAGES if from_shared_memory else _STAGES - 1
    of_queries = queries * padded(widest)
    of_keys = blocks * _BLOCK_KEYS * 2 * padded(widest)
    of_weights = queries * _BLOCK_KEYS
    return 2 * (of_queries + of_keys + of_weights)


def _queries(group: int) -> int:
    """Return the rows of a program's products: those of all query heads in a block."""
    return padded(BLOCK_ROWS * triton.next_power_of_2(group))


@cache
def overlaps(device: torch.device) -> bool:
    """Return whether a kernel can start before the one that it depends on has ended."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def attend_prefixes(
    prefixes: SharedPrefixes,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    scale_strides: tuple[int | None, ...],
    table: Tensor,
    slots: Tensor,
    *,
    scale: float,
    cap: float | None,
) -> PartialResults:
    """Attend with all rows of blocks to their shared tokens.

    See `decode_attention` for the arguments; here scores are in base 2. Results of other rows are
    not written.
    """
    rows, heads, dim = q.shape
    kv_heads, page_size, value_dim = values.shape[1:]
    group = heads // kv_heads
    queries = _queries(group)
    assert queries <= _MOST_QUERIES, f"{group} query heads a key head"
    results = PartialResults(
        torch.empty(rows, heads, value_dim, dtype=torch.float32, device=q.device),
        torch.empty(rows, heads, dtype=torch.float32, device=q.device),
    )

    _attend_blocks[(len(prefixes.rows), kv_heads)](
        q,
        keys,
        values,
        *scales,
        table,
        slots,
        *prefixes[:3],
        *results,
        scale,
        cap,
        *q.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        *scale_strides,
        table.stride(0),
        GROUP=group,
        DIM=dim,
        VALUE_DIM=value_dim,
        PAGE_SIZE=page_size,
        BLOCK_M=queries,
        BLOCK_N=_BLOCK_KEYS,
        BLOCK_DIM=padded(dim),
        BLOCK_VALUE=padded(value_dim),
        OVERLAPS=overlaps(q.device),
        num_warps=8 if queries > 64 else 4,
        num_stages=_STAGES,
    )
    return results


@triton.jit
def _attend_blocks(
    Q,
    KEYS,
    VALUES,
    KEY_SCALES,
    VALUE_SCALES,
    TABLE,
    SLOTS,
    ROWS,
    COUNTS,
    TOKENS,
    OUT,
    LSE,
    scale,
    cap,
    q_row,
    q_head,
    key_page,
    key_head,
    key_token: tl.constexpr,
    value_page,
    value_head,
    value_token: tl.constexpr,
    scale_page,
    scale_head,
    table_row,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute one block of rows, for the GROUP query heads of one key head."""
    if OVERLAPS:
        gdc_launch_dependents()
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    count = tl.load(COUNTS + block)
    if count == 0:
        return
    first_row = tl.load(ROWS + block).to(tl.int64)
    tokens = tl.load(TOKENS + block)
    slot = tl.load(SLOTS + first_row).to(tl.int64)
    pages = TABLE + slot * table_row
    offsets = tl.arange(0, BLOCK_N)
    page = tl.load(pages + offsets // PAGE_SIZE, mask=offsets < tokens, other=0)

    number = tl.arange(0, BLOCK_M)
    heads_of_a_row: tl.constexpr = triton.next_power_of_2(GROUP)
    member = number % heads_of_a_row
    number = number // heads_of_a_row
    real = (number < count) & (member < GROUP)
    row = first_row + number
    head = kv_head * GROUP + member
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    query = Q + (row * q_row + head * q_head)[:, None] + dims
    q = tl.load(query, mask=real[:, None] & (dims < DIM), other=0.0)

    key_scales = None
    value_scales = None
    if KEY_SCALES is not None:
        key_scales = KEY_SCALES + kv_head * scale_head
        value_scales = VALUE_SCALES + kv_head * scale_head
    m, total, acc = weigh_pages(
        q,
        KEYS + kv_head * key_head,
        VALUES + kv_head * value_head,
        key_scales,
        value_scales,
        pages,
        page,
        0,
        tokens,
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_VALUE], tl.float32),
        scale,
        cap,
        key_page,
        key_token,
        value_page,
        value_token,
        scale_page,
        DIM,
        VALUE_DIM,
        PAGE_SIZE,
        BLOCK_N,
        BLOCK_DIM,
        BLOCK_VALUE,
    )

    at = row * GROUP * tl.num_programs(1) + head
    tl.store(LSE + at, m + tl.log2(total), mask=real)
    store_mean(OUT, at, real, acc, total, VALUE_DIM)


@triton.jit
def with_prefix(m, total, acc, OUT, LSE, at, mask, VALUE_DIM: tl.constexpr, OVERLAPS: tl.constexpr):
    """Take the partial results `at` (M,) into a running softmax, after waiting for them."""
    if OVERLAPS:
        gdc_wait()
    dims = tl.arange(0, acc.shape[1])[None, :]
    inside = mask[:, None] & (dims < VALUE_DIM)
    # Past the L1 cache, which may hold the numbers of an earlier layer.
    lse = tl.load(LSE + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
    place = OUT + at[:, None] * VALUE_DIM + dims
    mean = tl.load(place, mask=inside, other=0.0, cache_modifier=".cg")

    new_m = tl.maximum(m, lse)
    base = finite(new_m)
    alpha = tl.exp2(m - base)
    weight = tl.exp2(lse - base)
    return new_m, total * alpha + weight, acc * alpha[:, None] + mean * weight[:, None]
