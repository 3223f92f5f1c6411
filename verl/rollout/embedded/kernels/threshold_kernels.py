"""Find the smallest logit that top-k and top-p keep, in Triton, by a search instead of a sort."""

import triton
import triton.language as tl

from verl.rollout.embedded.kernels.running_softmax import finite
from verl.rollout.embedded.kernels.sampling_kernels import load_logits, merge_sums

_LOG2_E = tl.constexpr(1.4426950408889634)
# E of `sampling_kernels._gumbel` lies in [2**-32, 22], so no two Gumbel variables differ by more than
# 25.3: a token whose logit / temperature is 26 below the largest is never drawn.
_REACH = tl.constexpr(26.0)


@triton.jit
def _order_key(x, DROPPED_BITS: tl.constexpr):
    """Return an integer that rises with the fp32 number x.

    It rises by one from each number of the logits' type to the next.
    """
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> DROPPED_BITS).to(tl.int64)


@triton.jit
def _of_order_key(key, DROPPED_BITS: tl.constexpr):
    """Return the number of the logits' type that has this order key."""
    bits = (key << DROPPED_BITS).to(tl.int32)
    bits = tl.where(bits < 0, (bits | ((1 << DROPPED_BITS) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _sums_above(
    row_ptr,
    first,
    second,
    third,
    base,
    scale,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Count a row's logits, or with WEIGHTED add up their weight, at or above each of three."""
    one = tl.zeros([BLOCK], tl.float32)
    two = tl.zeros([BLOCK], tl.float32)
    three = tl.zeros([BLOCK], tl.float32)
    for offset in tl.range(0, VOCABULARY, BLOCK, num_stages=1):
        x = load_logits(row_ptr, offset + tl.arange(0, BLOCK), VOCABULARY)
        weights = tl.exp2((x - base) * scale) if WEIGHTED else 1.0
        one += tl.where(x >= first, weights, 0.0)
        two += tl.where(x >= second, weights, 0.0)
        three += tl.where(x >= third, weights, 0.0)
    return tl.sum(one, axis=0), tl.sum(two, axis=0), tl.sum(three, axis=0)


@triton.jit
def _search(
    row_ptr,
    low,
    high,
    wanted,
    base,
    scale,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    DROPPED_BITS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Find the largest order key in [low, high) with at least `wanted` tokens at or above it.

    With WEIGHTED, with at least so much weight. If there is none, return `low`.

    Every pass over the row compares with three keys, which cut the interval into quarters. While it
    spans many powers of two, every other pass cuts it into equal lengths instead: between -1 and 1
    lie half of all keys, and few logits. With one token left in the interval, any key up to that
    token's is right: fp32 logits lie far apart among their keys.
    """
    wide: tl.constexpr = 8 << (23 - DROPPED_BITS)
    turn = 0
    at_low = float("inf")
    at_high = 0.0
    lightest = 1.0
    while (high - low > 1) & (at_low - at_high >= 2 * lightest):
        step = tl.maximum((high - low) // 4, 1)
        first = low + step
        second = low + 2 * step
        third = low + 3 * step
        if (high - low > wide) & (turn % 2 == 0):
            start = _of_order_key(low, DROPPED_BITS)
            quarter = (_of_order_key(high, DROPPED_BITS) - start) * 0.25
            first = tl.maximum(_order_key(start + quarter, DROPPED_BITS), low + 1)
            second = tl.maximum(_order_key(start + 2 * quarter, DROPPED_BITS), low + 1)
            third = tl.maximum(_order_key(start + 3 * quarter, DROPPED_BITS), low + 1)
        first = tl.minimum(first, high - 1)
        second = tl.minimum(second, high - 1)
        third = tl.minimum(third, high - 1)
        turn += 1

        one, two, three = _sums_above(
            row_ptr,
            _of_order_key(first, DROPPED_BITS),
            _of_order_key(second, DROPPED_BITS),
            _of_order_key(third, DROPPED_BITS),
            base,
            scale,
            VOCABULARY,
            BLOCK,
            WEIGHTED,
        )

        # Every branch shrinks the interval, even where a NaN makes all comparisons false.
        if one >= wanted:
            if two >= wanted:
                if three >= wanted:
                    low, at_low = third, three
                else:
                    low, at_low, high, at_high = second, two, third, three
            else:
                low, at_low, high, at_high = first, one, second, two
        else:
            high, at_high = first, one
        if WEIGHTED:
            lightest = tl.exp2((_of_order_key(low, DROPPED_BITS) - base) * scale)

    return low


@triton.jit
def find_threshold(
    logits,
    row_stride,
    settings,
    largest_ptr,
    totals_ptr,
    rows_ptr,
    VOCABULARY: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    DROPPED_BITS: tl.constexpr,
):
    """Find the smallest logit kept by top-k, and then by top-p among the tokens that top-k kept.

    Logits too small to be drawn at all are left out.
    """
    row = tl.program_id(0)
    row_ptr = logits + row.to(tl.int64) * row_stride
    temperature = tl.load(settings)
    top_p = tl.load(settings + 1)
    top_k = tl.load(settings + 3)
    scale = _LOG2_E / temperature
    largest, total = merge_sums(largest_ptr, totals_ptr, row, scale, NUM_CHUNKS, CHUNKS)
    base = finite(largest)

    low = _order_key(base - _REACH * temperature, DROPPED_BITS)
    high = _order_key(largest, DROPPED_BITS) + 1

    held = total
    if (top_k > 0) & (top_k < VOCABULARY):
        low = _search(
            row_ptr, low, high, top_k, base, scale, VOCABULARY, BLOCK, DROPPED_BITS, False
        )
        if top_p < 1:
            # The share is of exactly k tokens, even if more tie with the last of them.
            last = _of_order_key(low, DROPPED_BITS)
            above = _of_order_key(low + 1, DROPPED_BITS)
            count, _, _ = _sums_above(
                row_ptr, above, above, above, base, scale, VOCABULARY, BLOCK, False
            )
            weight, _, _ = _sums_above(
                row_ptr, above, above, above, base, scale, VOCABULARY, BLOCK, True
            )
            held = weight + (top_k - count) * tl.exp2((last - base) * scale)
    elif top_p < 1:
        # All tokens lighter than (1 - p) / V of the total can be dropped at once; a factor of two
        # is left for rounding.
        bound = base + temperature * tl.log(0.5 * (1.0 - top_p) * total / VOCABULARY)
        low = tl.maximum(low, tl.minimum(_order_key(bound, DROPPED_BITS), high - 1))

    if top_p < 1:
        low = _search(
            row_ptr, low, high, top_p * held, base, scale, VOCABULARY, BLOCK, DROPPED_BITS, True
        )

    tl.store(rows_ptr + row * 3, largest)
    tl.store(rows_ptr + row * 3 + 1, total)
    tl.store(rows_ptr + row * 3 + 2, _of_order_key(low, DROPPED_BITS))
