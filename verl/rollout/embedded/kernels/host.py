"""The kernels of a CPU, compiled by numba: what a decode step does between its matrix products, one call each, on the
rows of one thread; and the draw of a token in one pass over its row's logits.

They are in one file, because numba compiles again what it keeps on disk when the file of a function changes, and not
when those of the functions that it calls do.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from verl.rollout.sampling import shifted_column_hashes
from verl.rollout.types import SamplingParams
from verl.utils.logging import logger

# Sums may be added up in any order. NaN and infinity stay what they are.
_OPTIONS: dict[str, Any] = {
    "nogil": True,  # other threads have Python meanwhile
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "arcp", "nsz"},
}


def compiled(function: Callable[..., Any]) -> Any:
    """`function`, compiled at its first call and kept on disk for the next process."""
    try:
        return njit(cache=True, **_OPTIONS)(function)
    except RuntimeError as error:  # neither our folder nor the user's own can be written to
        logger.info(
            f"rollout: {error}. Every process compiles it again, in seconds, unless NUMBA_CACHE_DIR is a folder."
        )
        return njit(**_OPTIONS)(function)


inlined = njit(inline="always")  # into what is compiled, by whose rules it goes


@inlined
def exp(x: np.float32) -> np.float32:
    """e^x within 3e-7 of itself; 2e-38 for all x below -87 and 2e38 for all above 88, which callers do not tell from 0
    and infinity. Without a branch."""
    x = np.float32(-87) if x < np.float32(-87) else x
    x = np.float32(88) if x > np.float32(88) else x
    # e^x = 2^n e^f, |f| <= log(2) / 2. log(2) = 0.693359375 - 0.000212..., of few bits, so that n times it is exact.
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    f = x - n * np.float32(0.693359375)
    f = f + n * np.float32(2.12194440e-4)
    # The Taylor series to f^7; its rest is below 1e-8.
    power = np.float32(1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        power = power * f + np.float32(1 / divisor)
    return power * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@inlined
def log1p(x: np.float32) -> np.float32:
    """log(1 + x) for -1 <= x < 0 within 3e-7 of itself, and at least -22. Without a branch."""
    # 1 + x = 2^n m with sqrt(1/2) <= m < sqrt(2), and f = m - 1: for n = 0 that is x, whose last digits 1 + x has lost.
    bits = np.int32(np.float32(max(np.float32(1) + x, np.float32(2.0**-33))).view(np.int32) - np.int32(0x3F3504F3))
    n = np.float32(np.int32(bits >> np.int32(23)))
    m = np.int32(np.int32(bits & np.int32(0x007FFFFF)) + np.int32(0x3F3504F3)).view(np.float32)
    f = x if n == np.float32(0) else m - np.float32(1)
    # log((1 + s) / (1 - s)) = 2 (s + s^3 / 3 + s^5 / 5 + ...) with |s| < 0.172
    s = f / (np.float32(2) + f)
    square = s * s
    series = np.float32(1 / 9)
    for divisor in (7, 5, 3):
        series = series * square + np.float32(1 / divisor)
    log = np.float32(2) * s + np.float32(2) * s * square * series
    return max(n * np.float32(0.6931471805599453) + log, np.float32(-22))


@compiled
def largest_of(numbers: NDArray[np.float32]) -> np.float32:
    """The largest number, or a NaN that has no sign. As integers: those with the bits of floats are in the order of the
    floats, the negative ones in reverse, and many integers are compared at once."""
    bits = numbers.view(np.int32)
    largest = np.int32(-(2**31))
    for i in range(len(bits)):
        largest = max(largest, np.int32(bits[i] ^ ((bits[i] >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    return np.int32(largest ^ ((largest >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@compiled
def add_unit_rows(x, added, out, epsilon):
    """x += added, both (b, H); out (b, H) = x over the root of (its sum of squares + epsilon), row by row."""
    for row in range(x.shape[0]):
        squares = np.float32(0)
        for i in range(x.shape[1]):
            value = x[row, i] + added[row, i]
            x[row, i] = value
            squares += value * value
        factor = np.float32(1) / np.sqrt(squares + epsilon)
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] * factor


@compiled
def gate(gate_up, out):
    """out (b, I) = silu(gate) * up, of gate_up (2, b, I)."""
    for row in range(out.shape[0]):
        for i in range(out.shape[1]):
            gate = gate_up[0, row, i]
            out[row, i] = gate / (np.float32(1) + exp(-gate)) * gate_up[1, row, i]


@compiled
def attend(heads, norms, epsilon, turns, positions, keys, values, starts, column, window, scale, scores, out):
    """Attention of one new token a row, which comes as the product of its projections.

    heads (b, Hq + 2 Hk, D): queries, keys and values; overwritten. norms (Hq + Hk, D): factors of the norms of query
    and key heads, or (0, D). turns (P, D / 2): e^(i angle) at each position. keys, values (b, Hk, C, D): the new token
    goes to `column`, and a row's first one is at starts (b,). scores (C,) is scratch. out (b, Hq, D).
    """
    num_key_heads = keys.shape[1]
    num_query_heads = heads.shape[1] - 2 * num_key_heads
    groups = num_query_heads // num_key_heads
    for row in range(heads.shape[0]):
        mine = heads[row]
        if norms.shape[0] > 0:
            _normalize(mine[:-num_key_heads], norms, epsilon)
        _rotate(mine[:-num_key_heads], turns[positions[row]])
        first = max(starts[row], column + 1 - window)
        for head in range(num_key_heads):
            keys[row, head, column] = mine[num_query_heads + head]
            values[row, head, column] = mine[num_query_heads + num_key_heads + head]
            seen_keys, seen_values = keys[row, head, first : column + 1], values[row, head, first : column + 1]
            seen_scores = scores[: len(seen_keys)]
            for query in range(head * groups, (head + 1) * groups):
                _score(mine[query], seen_keys, scale, seen_scores)
                _softmax(seen_scores)
                _mix(seen_scores, seen_values, out[row, query])


@inlined
def _normalize(heads, norms, epsilon):
    for head in range(len(heads)):
        squares = np.float32(0)
        for i in range(heads.shape[1]):
            squares += heads[head, i] * heads[head, i]
        factor = np.float32(1) / np.sqrt(squares + epsilon)
        for i in range(heads.shape[1]):
            heads[head, i] = heads[head, i] * factor * norms[head, i]


@inlined
def _rotate(heads, turn):
    pairs = heads.view(np.complex64)
    for head in range(len(pairs)):
        for i in range(len(turn)):
            pairs[head, i] = pairs[head, i] * turn[i]


@inlined
def _score(query, keys, scale, scores):
    """scores (L,) = keys (L, D) times query (D,); four at a time, so that a number of the query is loaded once."""
    fours = len(keys) - len(keys) % 4
    for at in range(0, fours, 4):
        score_0 = score_1 = score_2 = score_3 = np.float32(0)
        for i in range(len(query)):
            score_0 += query[i] * keys[at, i]
            score_1 += query[i] * keys[at + 1, i]
            score_2 += query[i] * keys[at + 2, i]
            score_3 += query[i] * keys[at + 3, i]
        scores[at], scores[at + 1] = score_0 * scale, score_1 * scale
        scores[at + 2], scores[at + 3] = score_2 * scale, score_3 * scale
    for at in range(fours, len(keys)):
        score = np.float32(0)
        for i in range(len(query)):
            score += query[i] * keys[at, i]
        scores[at] = score * scale


@inlined
def _softmax(scores):
    largest = largest_of(scores)
    total = np.float32(0)
    for at in range(len(scores)):
        weight = exp(scores[at] - largest)
        scores[at] = weight
        total += weight
    for at in range(len(scores)):
        scores[at] /= total


@inlined
def _mix(weights, values, out):
    """out (D,) = weights (L,) times values (L, D); four at a time, so that a sum is loaded and stored once."""
    for i in range(len(out)):
        out[i] = np.float32(0)
    fours = len(values) - len(values) % 4
    for at in range(0, fours, 4):
        weight_0, weight_1, weight_2, weight_3 = weights[at], weights[at + 1], weights[at + 2], weights[at + 3]
        for i in range(len(out)):
            out[i] += (
                weight_0 * values[at, i]
                + weight_1 * values[at + 1, i]
                + weight_2 * values[at + 2, i]
                + weight_3 * values[at + 3, i]
            )
    for at in range(fours, len(values)):
        weight = weights[at]
        for i in range(len(out)):
            out[i] += weight * values[at, i]


def can_sample(logits: torch.Tensor, params: SamplingParams) -> bool:
    """Whether `sample` draws by these parameters: from whole vocabularies alone."""
    return logits.dtype == torch.float32 and not params.is_filtered


def sample(
    logits: torch.Tensor, params: SamplingParams, keys: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`verl.rollout.sampling.sample`, with the same noise, whose logarithms may differ in the last place."""
    rows, vocabulary = logits.shape
    tokens, log_probs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    columns = shifted_column_hashes(vocabulary, logits.device)[0]
    noise = torch.empty(0, 2, dtype=torch.int32) if keys is None else keys
    _draw(
        logits.numpy(), np.float32(params.temperature or 1.0), noise.numpy().view(np.uint32),
        columns.numpy().view(np.uint32), np.empty(vocabulary, np.float32), tokens.numpy(), log_probs.numpy(),
    )  # fmt: skip
    return tokens, log_probs


@compiled
def _draw(logits, temperature, keys, columns, scratch, tokens, log_probs):
    """tokens (b,) and log_probs (b,) from logits (b, V), uint32 row keys (b, 2), or (0, 2) for the largest logit, and
    column hashes (V,). scratch (V,)."""
    factor = np.float32(1) / temperature
    for row in range(logits.shape[0]):
        mine = logits[row]
        largest = largest_of(mine) * factor
        total = np.float32(0)
        for i in range(len(mine)):
            weight = exp(mine[i] * factor - largest)
            scratch[i] = weight
            total += weight
        if keys.shape[0] > 0:
            first = np.uint32(keys[row, 0] ^ (keys[row, 0] >> np.uint32(16)))
            second = keys[row, 1]
            for i in range(len(mine)):
                # `noise_integers` and `negative_exponential_noise`
                bits = np.uint32(columns[i] ^ first)
                bits = np.uint32(second + np.uint32(bits * np.uint32(0x85EBCA6B)))
                bits = np.uint32(bits ^ (bits >> np.uint32(13)))
                bits = np.uint32(bits * np.uint32(0xC2B2AE35))
                bits = np.uint32(bits ^ (bits >> np.uint32(16)))
                number = np.float32(np.int32(bits & np.uint32(0x7FFFFFFF)))
                scratch[i] /= -log1p(np.float32(-(2.0**-32)) - number * np.float32(2.0**-31))
        token = _first(scratch, largest_of(scratch))
        tokens[row] = token
        log_probs[row] = mine[token] * factor - largest - np.float32(np.log(total))


@compiled
def _first(numbers, wanted):
    """Where `wanted` is first; 0 if it is NaN, and so is the log-prob then."""
    for i in range(len(numbers)):
        if numbers[i] == wanted:
            return i
    return 0
