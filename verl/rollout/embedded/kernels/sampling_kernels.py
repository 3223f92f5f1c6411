"""Draw tokens in Triton, for `verl.rollout.embedded.kernels.sampling`."""

import triton
import triton.language as tl

from verl.rollout.embedded.kernels.running_softmax import finite

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # the constants of SplitMix64
_SPLITMIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_SPLITMIX_2 = tl.constexpr(0x94D049BB133111EB)
_MURMUR_1 = tl.constexpr(0x85EBCA6B)  # of MurmurHash3's 32-bit finalizer
_MURMUR_2 = tl.constexpr(0xC2B2AE35)
_LOG2_E = tl.constexpr(1.4426950408889634)
_2_TO_23 = tl.constexpr(8388608.0)


@triton.jit
def load_logits(row_ptr, columns, end):
    return tl.load(row_ptr + columns, mask=columns < end, other=float("-inf")).to(tl.float32)


@triton.jit
def _block_columns(start, BLOCK: tl.constexpr):
    """Return the columns of a block (32, BLOCK / 32): each lane of the warp has some in a row."""
    EACH: tl.constexpr = BLOCK // 32
    return start + tl.arange(0, 32)[:, None] * EACH + tl.arange(0, EACH)[None, :]


@triton.jit
def _add_block(x, largest, totals, scale):
    """Take logits x (32, N) into each lane's running maximum and sum of exponentials.

    Returns weights, maxima and sums. Lanes wait for one another at the end of the chunk alone.
    """
    peak = tl.maximum(largest, tl.max(x, 1))
    base = finite(peak)
    weights = tl.exp2((x - base[:, None]) * scale)
    totals = totals * tl.exp2((largest - base) * scale) + tl.sum(weights, 1)
    return weights, peak, totals


@triton.jit
def _store_sums(largest, totals, scale, largest_ptr, totals_ptr):
    """Merge the lanes' maxima and sums, and store them."""
    peak = tl.max(largest, 0)
    factors = tl.exp2((largest - finite(peak)) * scale)
    tl.store(largest_ptr, peak)
    tl.store(totals_ptr, tl.sum(totals * factors, 0))
    return peak


@triton.jit
def scan(
    logits,
    row_stride,
    settings,
    largest_ptr,
    totals_ptr,
    scores_ptr,
    columns_ptr,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """Find maximum and sum of exponentials of one row's chunk.

    If greedy, they are at temperature 1, and the place of the maximum is found too.
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    row_ptr = logits + row.to(tl.int64) * row_stride
    start = chunk * CHUNK
    scale = _LOG2_E if GREEDY else _LOG2_E / tl.load(settings)

    largest = tl.full([32], float("-inf"), tl.float32)
    totals = tl.zeros([32], tl.float32)
    places = tl.zeros([32], tl.int32) + start
    offset = start
    end = tl.minimum(start + CHUNK, VOCABULARY)
    upcoming = load_logits(row_ptr, _block_columns(start, BLOCK), VOCABULARY)

    while offset < end:
        columns = _block_columns(offset, BLOCK)
        x = upcoming
        upcoming = load_logits(row_ptr, columns + BLOCK, end)
        before = largest
        _, largest, totals = _add_block(x, largest, totals, scale)
        if GREEDY:
            first = tl.min(tl.where(x == largest[:, None], columns, VOCABULARY - 1), 1)
            places = tl.where(largest > before, first, places)
        offset += BLOCK

    here = row * tl.num_programs(1) + chunk
    peak = _store_sums(largest, totals, scale, largest_ptr + here, totals_ptr + here)
    if GREEDY:
        column = tl.min(tl.where(largest == peak, places, VOCABULARY - 1), 0)
        tl.store(scores_ptr + here, peak)
        tl.store(columns_ptr + here, column)


@triton.jit
def _draw_key(slots, keys, drawn, row):
    """Compute `row_keys`, SplitMix64 of the sample's key and the position.

    Returns two uint32, the first shifted as hashes are.
    """
    slot = tl.load(slots + row)
    bits = tl.load(keys + slot).to(tl.uint64, bitcast=True)
    bits += tl.load(drawn + slot).to(tl.uint64) * _GOLDEN
    bits += _GOLDEN
    bits = (bits ^ (bits >> 30)) * _SPLITMIX_1
    bits = (bits ^ (bits >> 27)) * _SPLITMIX_2
    bits = bits ^ (bits >> 31)
    low = bits.to(tl.uint32)
    return low ^ (low >> 16), (bits >> 32).to(tl.uint32)


@triton.jit
def _mixed_bits(hashes, columns, key_low, key_high, VOCABULARY: tl.constexpr):
    """Compute the bits of these columns before the last step of `noise_integers`."""
    bits = tl.load(
        hashes + columns, mask=columns < VOCABULARY, other=0, eviction_policy="evict_last"
    )
    bits = (bits.to(tl.uint32, bitcast=True) ^ key_low) * _MURMUR_1 + key_high
    return (bits ^ (bits >> 13)) * _MURMUR_2


@triton.jit
def _noise_integers(bits):
    """Compute `noise_integers` of `_mixed_bits`: uint32 below 2**31."""
    return (bits ^ (bits >> 16)) & 0x7FFFFFFF


@triton.jit
def _gumbel(noise):
    """Turn noise integers into Gumbel variables.

    They are -log(E) with E = -log1p(-u) and u = (noise + 1/2) / 2**31.
    """
    uniform = (noise.to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    # 1 - u would round the winners' end, u near 0; there the series is exact to 1e-7.
    series = 1 / 5 + uniform * (1 / 6 + uniform * (1 / 7))
    series = uniform * (
        1.0 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * (1 / 4 + uniform * series)))
    )
    exponential = tl.where(uniform < 0.125, series, -tl.log(1.0 - uniform))
    # The last 64 integers round to u = 1. Their E must be finite: the only token left by a filter
    # wins with any noise.
    return -tl.log(tl.minimum(exponential, 22.0))


@triton.jit
def _leading_bits(noise):
    """Return 2**23 + noise // 256 in fp32, without a conversion.

    The bits are the mantissa of a number in [2**23, 2**24).
    """
    return ((noise >> 8) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _rough_leading_bits(bits):
    """Return `_leading_bits`, rounded down to the 15 that the last step leaves as they are."""
    return (((bits >> 8) & 0x7FFF00) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _reach(deficit):
    """Return the factor of weights below which u must be, in units of 2**-23.

    A column with log(weight) + Gumbel < -deficit loses, as E >= u > weight * exp(deficit). 1.01 is
    for rounding errors, 1e30 for 0 * inf.
    """
    return tl.minimum(tl.exp2(deficit * _LOG2_E) * (1.01 * _2_TO_23), 1e30)


@triton.jit
def _may_win(noise, weights, deficit):
    """Rule out columns with log(weight) + Gumbel < -deficit."""
    # The right side is rounded to an integer; rounding keeps the order, so that it hides no winner.
    return _leading_bits(noise) <= weights * _reach(deficit) + _2_TO_23


@triton.jit
def _most_promising(noise, weights, columns, VOCABULARY: tl.constexpr):
    """Return the column with the largest, or nearly the largest, weight / u."""
    # A positive float's bits, read as an integer, are its logarithm to 0.09 of a factor of two.
    uniform = _leading_bits(noise) - (_2_TO_23 - 1.0)
    promise = weights.to(tl.int32, bitcast=True) - uniform.to(tl.int32, bitcast=True)
    promise = tl.where(weights > 0, promise, -2147483648)
    is_best = promise == tl.max(promise)
    return tl.min(tl.where(is_best, columns, VOCABULARY - 1))


@triton.jit
def scan_and_draw(
    logits,
    row_stride,
    settings,
    hashes,
    slots,
    keys,
    drawn,
    rows_ptr,
    largest_ptr,
    totals_ptr,
    scores_ptr,
    columns_ptr,
    VOCABULARY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """Find the best logit / temperature + Gumbel noise of one row's chunk, and its column.

    Without filters it also computes the sums.

    Two logarithms a token would cost more than all the rest. A token beats the best score s so far
    if exp(x / T - s) > E, and E >= u: comparing the noise integers with the weights that the sum
    needs anyway rules out most blocks.
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    row_ptr = logits + row.to(tl.int64) * row_stride
    start = chunk * CHUNK
    inverse = 1.0 / tl.load(settings)
    scale = inverse * _LOG2_E
    key_low, key_high = _draw_key(slots, keys, drawn, row)
    largest = tl.full([32], float("-inf"), tl.float32)
    totals = tl.zeros([32], tl.float32)
    best = float("-inf")
    column = start

    if FILTERED:
        min_p = tl.load(settings + 2)
        largest = tl.zeros([32], tl.float32) + tl.load(rows_ptr + row * 3)
        threshold = tl.load(rows_ptr + row * 3 + 2)

    offset = start
    end = tl.minimum(start + CHUNK, VOCABULARY)
    upcoming = load_logits(row_ptr, _block_columns(start, BLOCK), VOCABULARY)
    while offset < end:
        columns = _block_columns(offset, BLOCK)
        x = upcoming
        # loaded while these are weighed
        upcoming = load_logits(row_ptr, columns + BLOCK, end)
        if FILTERED:
            weights = tl.exp2((x - finite(largest)[:, None]) * scale)
            weights = tl.where((x >= threshold) & (weights >= min_p), weights, 0.0)
            useful = tl.max(weights) > 0
        else:
            weights, largest, totals = _add_block(x, largest, totals, scale)
            useful = True
        if useful:
            bits = _mixed_bits(hashes, columns, key_low, key_high, VOCABULARY)
            # `_may_win` with less of the noise and each lane's own maximum: few blocks pass.
            reach = _reach(finite(largest) * inverse - best)
            ahead = tl.max(weights * reach[:, None] - _rough_leading_bits(bits), 1)
            if tl.max((ahead >= -_2_TO_23).to(tl.int32), 0) > 0:
                # The most promising token is tried alone; in most blocks no other can beat it then.
                noise = _noise_integers(bits)
                peak = finite(tl.max(largest, 0))
                # A lane without finite logits may have 0 * inf here. NaN is not hopeful.
                weights *= tl.exp2((finite(largest) - peak) * scale)[:, None]
                hopeful = _may_win(noise, weights, peak * inverse - best)
                weights = tl.where(hopeful, weights, 0.0)
                while tl.max((weights > 0).to(tl.int32)) > 0:
                    tried = _most_promising(noise, weights, columns, VOCABULARY)
                    score = tl.load(row_ptr + tried).to(tl.float32) * inverse
                    own = _noise_integers(_mixed_bits(hashes, tried, key_low, key_high, VOCABULARY))
                    score += _gumbel(own)
                    if (score > best) | ((score == best) & (tried < column)):
                        best, column = score, tried
                    hopeful = _may_win(noise, weights, peak * inverse - best)
                    weights = tl.where(hopeful & (columns != tried), weights, 0.0)
        offset += BLOCK

    here = row * tl.num_programs(1) + chunk
    tl.store(scores_ptr + here, best)
    tl.store(columns_ptr + here, column)

    if not FILTERED:
        _store_sums(largest, totals, scale, largest_ptr + here, totals_ptr + here)


@triton.jit
def merge_sums(largest_ptr, totals_ptr, row, scale, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """Compute maximum and sum of exponentials of a row from those of its chunks."""
    chunks = tl.arange(0, CHUNKS)
    parts = tl.load(
        largest_ptr + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=float("-inf")
    )
    totals = tl.load(totals_ptr + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=0.0)
    largest = tl.max(parts, axis=0)
    factors = tl.exp2((parts - finite(largest)) * scale)
    return largest, tl.sum(totals * factors, axis=0)


@triton.jit
def merge(
    logits,
    row_stride,
    settings,
    largest_ptr,
    totals_ptr,
    scores_ptr,
    columns_ptr,
    rows_ptr,
    tokens_ptr,
    log_probs_ptr,
    VOCABULARY: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    GREEDY: tl.constexpr,
    FILTERED: tl.constexpr,
):
    """Choose the best token of a row's chunks, the first of equals, and compute its log-prob."""
    row = tl.program_id(0)
    inverse = 1.0 if GREEDY else 1.0 / tl.load(settings)
    if FILTERED:
        largest = tl.load(rows_ptr + row * 3)
        total = tl.load(rows_ptr + row * 3 + 1)
    else:
        largest, total = merge_sums(
            largest_ptr, totals_ptr, row, inverse * _LOG2_E, NUM_CHUNKS, CHUNKS
        )

    chunks = tl.arange(0, CHUNKS)
    inside = chunks < NUM_CHUNKS
    scores = tl.load(scores_ptr + row * NUM_CHUNKS + chunks, mask=inside, other=float("-inf"))
    columns = tl.load(columns_ptr + row * NUM_CHUNKS + chunks, mask=inside, other=VOCABULARY - 1)
    # The token must be one of the vocabulary, even where a NaN equals no score.
    is_best = scores == tl.max(scores, axis=0)
    token = tl.min(tl.where(is_best, columns, VOCABULARY - 1), axis=0)
    row_ptr = logits + row.to(tl.int64) * row_stride
    logit = tl.load(row_ptr + token).to(tl.float32)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(log_probs_ptr + row, (logit - largest) * inverse - tl.log(total))
