"""The softmax of attention, over one block of keys after the other.

It keeps the maximum of a query's scores, the sum of its weights and the sum of weighted values.
Scores are in base 2. `merged` joins the parts that several programs have computed.
"""

import triton
import triton.language as tl

# partial results that a program reads at a time: that many loads wait together
_MERGED = tl.constexpr(4)


@triton.jit
def finite(largest):
    """Return the number that is subtracted in exponents.

    Where all scores are -inf, their weights become 0, not exp(-inf + inf).
    """
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def weigh(q, k, v, seen, m, total, acc, scale, cap):
    """Take keys and values into the running softmax.

    Returns the maximum, the sum of the weights, and the sum of weighted values.
    """
    p, alpha, m, total = weights_of(q, k, seen, m, total, scale, cap, None)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return m, total, acc


@triton.jit
def weights_of(q, k, seen, m, total, scale, cap, key_scales):
    """Return the weights (M, N) of keys, multiples of `key_scales` (N,) if these are given.

    After them come the factor (M,) for earlier weights, the new maximum and the new sum of weights.
    """
    # "ieee": fp32 operands would be rounded to TF32 otherwise.
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if key_scales is not None:
        s *= key_scales[None, :]
    s = capped(s * scale, cap)
    s = tl.where(seen[None, :], s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, 1))
    p = tl.exp2(s - new_m[:, None])
    alpha = tl.exp2(m - new_m)
    return p, alpha, new_m, total * alpha + tl.sum(p, 1)


@triton.jit
def weigh_one(q, k, v, sink, scale, cap):
    """Begin the running softmax with one key k (1, D)."""
    s = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
    s = capped(s * scale, cap)
    m = tl.maximum(sink, s)
    total = tl.exp2(s - m)
    return m, total, total[:, None] * v.to(tl.float32)


@triton.jit
def capped(s, cap):
    """Cap multiples of `cap` softly; None: no cap."""
    if cap is not None:
        s = cap * (2 * tl.sigmoid(2 * s) - 1)  # tanh
    return s


@triton.jit
def store_mean(OUT, place, mask, acc, total, VALUE_DIM: tl.constexpr):
    """Divide and write; a query that saw no key gives 0."""
    dims = tl.arange(0, acc.shape[1])[None, :]
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = OUT + place[:, None] * VALUE_DIM + dims
    inside = mask[:, None] & (dims < VALUE_DIM)
    tl.store(at, result.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def merged(
    PARTIAL_OUT,
    PARTIAL_LSE,
    partial,
    real,
    count,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Merge the `count` partials of each query head, weighted by their denominators, in order.

    The first of them is at `partial` (M,).
    """
    m = tl.full(partial.shape, float("-inf"), tl.float32)
    total = tl.zeros(partial.shape, tl.float32)
    acc = tl.zeros([partial.shape[0], BLOCK_VALUE], tl.float32)
    dims = tl.arange(0, BLOCK_VALUE)[None, :]

    for first in range(0, count, _MERGED):
        for number in tl.static_range(_MERGED):
            split = first + number
            written = real & (split < count)
            # Past the L1 cache, which may hold the numbers of an earlier layer.
            lse = tl.load(
                PARTIAL_LSE + partial + split,
                mask=written,
                other=float("-inf"),
                cache_modifier=".cg",
            )
            at = PARTIAL_OUT + (partial + split)[:, None] * VALUE_DIM + dims
            part = tl.load(
                at, mask=written[:, None] & (dims < VALUE_DIM), other=0.0, cache_modifier=".cg"
            )
            new_m = tl.maximum(m, lse)
            # A padding head has no partial at all: -inf minus -inf would be NaN.
            weight = tl.where(written, tl.exp2(lse - new_m), 0.0)
            alpha = tl.where(m > float("-inf"), tl.exp2(m - new_m), 0.0)
            total = total * alpha + weight
            acc = acc * alpha[:, None] + part * weight[:, None]
            m = new_m

    return total, acc
