"""Take the pages of a row into softmaxes of single warps, which are joined at the end.

In `page_blocks` the warps of a program share every block of keys: nine times a block they wait for
one another, to find the largest score, to add weights, and to hand these to the warp that has the
values. Here each warp has its own 16 or more keys of a block, with a maximum, a sum and weighted
values of their own. Products have three dimensions, and the first is the warp. They wait only for
the loads.

It takes more registers: each warp holds weighted values of the whole head.
"""

import triton
import triton.language as tl

from verl.rollout.embedded.kernels.running_softmax import capped, finite


@triton.jit
def warp_lookups(BLOCK_N: tl.constexpr, WARPS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Return the keys of a block whose pages are looked up, (WARPS, 1) or (WARPS, N).

    Each warp has N keys in a row. They are in one page, unless pages are smaller.
    """
    N: tl.constexpr = BLOCK_N // WARPS
    first = tl.arange(0, WARPS)[:, None] * N
    if PAGE_SIZE >= N:
        return first
    else:
        return first + tl.arange(0, N)[None, :]


@triton.jit
def weigh_by_warps(
    q,
    keys,
    values,
    pages,
    page,
    begin,
    last,
    m,
    total,
    acc,
    scale,
    cap,
    key_page,
    key_token: tl.constexpr,
    value_page,
    value_token: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    GROUP: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Take the tokens [begin, last) into the softmax of q (M, BLOCK_DIM), of which GROUP are real.

    `page` has ids for `warp_lookups` of the first block. Later ones are loaded one block ahead, as
    in `page_blocks`.
    """
    M: tl.constexpr = q.shape[0]
    queries = tl.broadcast_to(q[None, :, :], [WARPS, M, BLOCK_DIM])
    peaks = tl.full([WARPS, M], float("-inf"), tl.float32)
    totals = tl.zeros([WARPS, M], tl.float32)
    sums = tl.zeros([WARPS, M, BLOCK_VALUE], tl.float32)

    N: tl.constexpr = BLOCK_N // WARPS
    looked_up = warp_lookups(BLOCK_N, WARPS, PAGE_SIZE)
    offsets = tl.arange(0, WARPS)[:, None] * N + tl.arange(0, N)[None, :]
    start = begin // BLOCK_N * BLOCK_N
    for block in range(start, last, BLOCK_N):
        tokens = block + offsets
        seen = (tokens >= begin) & (tokens < last)
        later = block + BLOCK_N + looked_up
        next_page = tl.load(pages + later.to(tl.uint32) // PAGE_SIZE, mask=later < last, other=0)
        within = (block + looked_up).to(tl.uint32) % PAGE_SIZE
        k = _read(keys, page, key_page, within, key_token, seen, DIM, BLOCK_DIM)
        v = _read(values, page, value_page, within, value_token, seen, VALUE_DIM, BLOCK_VALUE)

        scores = capped(tl.dot(queries, tl.permute(k, (0, 2, 1))) * scale, cap)
        scores = tl.where(seen[:, None, :], scores, float("-inf"))
        new_peaks = tl.maximum(peaks, tl.max(scores, 2))
        base = finite(new_peaks)  # a warp may have seen no key so far
        weights = tl.exp2(scores - base[:, :, None])
        alpha = tl.exp2(peaks - base)
        totals = totals * alpha + tl.sum(weights, 2)
        sums = tl.dot(weights.to(v.dtype), v, sums * alpha[:, :, None])
        peaks = new_peaks
        page = next_page

    new_m = tl.maximum(m, tl.max(peaks, 0))
    base = finite(new_m)
    factors = tl.exp2(peaks - base[None, :])
    sums *= factors[:, :, None]
    alpha = tl.exp2(m - base)
    total = total * alpha + tl.sum(totals * factors, 0)
    return new_m, total, acc * alpha[:, None] + _joined(sums, GROUP)


@triton.jit
def _read(
    CACHE,
    page,
    page_stride,
    within,
    token_stride: tl.constexpr,
    seen,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load keys or values (WARPS, N, BLOCK), of which `seen` (WARPS, N) are read.

    `page` and `within` are those of `warp_lookups`.
    """
    dims = tl.arange(0, BLOCK)[None, None, :]
    mask = seen[:, :, None] if DIM == BLOCK else seen[:, :, None] & (dims < DIM)
    # 64-bit: pages of all layers interleave, so the stride of a page is large.
    at = (CACHE + page.to(tl.int64) * page_stride + within * token_stride)[:, :, None]
    if page.shape[1] < seen.shape[1]:
        # one address for a warp, and constants
        at += (tl.arange(0, seen.shape[1]) * token_stride)[None, :, None]
    return tl.load(at + dims, mask=mask, other=0.0)


@triton.jit
def _joined(sums, GROUP: tl.constexpr):
    """Add (WARPS, M, D) over the warps.

    `tl.sum` would take the numbers through shared memory one by one, several microseconds. `split`
    has them moved as vectors, because it needs what it divides within a thread. Of 16 rows only the
    upper half is moved if there are no more heads.
    """
    WARPS: tl.constexpr = sums.shape[0]
    M: tl.constexpr = sums.shape[1]
    D: tl.constexpr = sums.shape[2]
    if GROUP > M // 2:
        return _added(tl.permute(sums, (1, 2, 0)))
    else:
        halves = tl.reshape(sums, [WARPS, 2, M // 2, D])
        upper, _ = tl.split(tl.permute(halves, (0, 2, 3, 1)))
        upper = _added(tl.permute(upper, (1, 2, 0)))
        both = tl.join(upper, tl.zeros_like(upper))
        return tl.reshape(tl.permute(both, (2, 0, 1)), [M, D])


@triton.jit
def _added(parts):
    """Add (M, D, WARPS) over the last dimension: 2, 4 or 8 warps."""
    M: tl.constexpr = parts.shape[0]
    D: tl.constexpr = parts.shape[1]
    if parts.shape[2] == 8:
        one, other = tl.split(tl.reshape(parts, [M, D, 4, 2]))
        parts = one + other
    if parts.shape[2] == 4:
        one, other = tl.split(tl.reshape(parts, [M, D, 2, 2]))
        parts = one + other
    one, other = tl.split(parts)
    return one + other
