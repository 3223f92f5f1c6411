"""Generate tokens on a CPU, in kernels that numba compiles.

They take the rows of one thread through all layers of a decode step, and draw a token in one pass
over its row's logits.

All kernels are in this one file. numba keeps compiled functions on disk, and compiles a function
again when its own file changes, but not when the files of the functions that it calls change.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np
from numba import njit, types
from numba.core import event
from numpy.typing import NDArray

from verl.rollout.embedded.kernels.blas import sgemm_address
from verl.utils.logging import logger, say_once


class _Compilation(event.Listener):
    """Says why the first call waits."""

    def on_start(self, event: event.Event) -> None:
        if event.data["dispatcher"].py_func.__module__ == __name__:
            say_once(
                "rollout: numba compiles kernels for this CPU, which takes about 10 s. It happens "
                "once if they can be kept on disk."
            )

    def on_end(self, event: event.Event) -> None:
        """Do nothing. A listener must have this method."""


event.register("numba:compile", _Compilation())

# Sums may be added up in any order. NaN and infinity keep their meaning.
_OPTIONS: dict[str, Any] = {
    "nogil": True,  # other threads can run Python meanwhile
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "arcp", "nsz"},
}


def compiled(function: Callable[..., Any]) -> Any:
    """Compile `function` at its first call, and keep it on disk for the next process."""
    try:
        return njit(cache=True, **_OPTIONS)(function)
    except RuntimeError as error:  # neither our folder nor the user's can be written to
        logger.info(
            f"rollout: {error}. Every process compiles it again, in seconds. To keep it, set "
            "NUMBA_CACHE_DIR to a folder."
        )
        return njit(**_OPTIONS)(function)


inlined = njit(inline="always")  # into compiled functions, whose options then apply


# Kernels kept on disk refer to it by this name, which stands for its address in this process.
llvmlite.binding.add_symbol("verl_sgemm", sgemm_address())
_sgemm = types.ExternalFunction("verl_sgemm", types.void(*[types.voidptr] * 13))
# a matrix as it lies in memory, and a transposed one
_FORMS = np.array([ord("N"), ord("T")], np.uint8)


@inlined
def exp(x: np.float32) -> np.float32:
    """Compute e^x without a branch, with a relative error below 3e-7.

    It is 2e-38 for all x below -87 and 2e38 for all above 88. Callers treat these as 0 and
    infinity.
    """
    x = np.float32(-87) if x < np.float32(-87) else x
    x = np.float32(88) if x > np.float32(88) else x
    # e^x = 2^n e^f, |f| <= log(2) / 2. log(2) = 0.693359375 - 0.000212..., of few bits, so that n
    # times it is exact.
    n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
    f = x - n * np.float32(0.693359375)
    f = f + n * np.float32(2.12194440e-4)
    # The Taylor series to f^7; its rest is below 1e-8.
    power = np.float32(1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        power = power * f + np.float32(1 / divisor)
    exponent = np.int32(np.int32(n) + np.int32(127))
    return power * np.int32(exponent << np.int32(23)).view(np.float32)


@inlined
def log1p(x: np.float32) -> np.float32:
    """Compute log(1 + x) for -1 <= x < 0 without a branch.

    The relative error is below 3e-7. The result is at least -22.
    """
    # 1 + x = 2^n m with sqrt(1/2) <= m < sqrt(2), and f = m - 1: for n = 0 that is x, whose last
    # digits 1 + x has lost.
    root = np.int32(0x3F3504F3)  # the bits of sqrt(1/2)
    number = np.float32(max(np.float32(1) + x, np.float32(2.0**-33)))
    bits = np.int32(number.view(np.int32) - root)
    n = np.float32(np.int32(bits >> np.int32(23)))
    digits = np.int32(bits & np.int32(0x007FFFFF))
    m = np.int32(digits + root).view(np.float32)
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
    """Return the largest number, or a NaN without sign.

    The bits are compared as integers, many at once. They are in the order of the floats, except
    that negative ones are in reverse.
    """
    bits = numbers.view(np.int32)
    largest = np.int32(-(2**31))
    for i in range(len(bits)):
        largest = max(largest, _order_key(bits[i]))
    return _order_key(largest).view(np.float32)


@inlined
def _order_key(bits: np.int32) -> np.int32:
    """Reverse the bits of a negative float, as an integer; twice gives them back."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@compiled
def add_unit_rows(x, added, out, epsilon):
    """Add `added` to x, both (b, H), and write x scaled row by row to out (b, H).

    A row is divided by the root of (its sum of squares + epsilon).
    """
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
    """Write silu(gate) * up to out (b, I), from gate_up (2, b, I)."""
    for row in range(out.shape[0]):
        for i in range(out.shape[1]):
            gate = gate_up[0, row, i]
            out[row, i] = gate / (np.float32(1) + exp(-gate)) * gate_up[1, row, i]


@compiled
def generate(
    ids,
    noise,
    weights,
    keys,
    values,
    starts,
    first,
    column,
    memory,
    temperature,
    columns,
    tokens,
    log_probs,
):
    """Write tokens (s, b) and log_probs (s, b) of s steps, the first of which gets `ids` (b,).

    noise (s, b, 2), or (s, 0, 2) for the largest logits. `weights` and `memory` are those of
    `host_arrays`, and the other arguments those of `step` and `draw`.
    """
    last = ids
    most = len(memory.logits)

    for number in range(len(tokens)):
        step(last, weights, keys, values, starts, first, column + number, memory)
        last = tokens[number]
        for begin in range(0, len(ids), most):
            end = min(begin + most, len(ids))
            logits = memory.logits[: end - begin]
            multiply(memory.normed[begin:end], weights.head, weights.head_bias, logits, True)
            draw(
                logits,
                temperature,
                noise[number, begin:end],
                columns,
                memory.scratch,
                last[begin:end],
                log_probs[number, begin:end],
            )


@compiled
def step(ids, weights, keys, values, starts, first, column, memory):
    """Write the last hidden states of one new token a row, `ids` (b,), to memory.normed (b, H).

    Its keys and values go to `column` of the rows of keys and values (n, C, R, Hk, D) from `first`
    on. `attend` describes starts (R,) and the rest.
    """
    rows, hidden = memory.stream.shape
    heads = memory.heads.reshape(rows, -1)
    mixed = memory.mixed.reshape(rows, -1)

    for row in range(rows):
        for i in range(hidden):
            memory.stream[row, i] = weights.embeddings[ids[row], i]
            memory.added[row, i] = np.float32(0)

    for layer in range(len(weights.qkv)):
        add_unit_rows(memory.stream, memory.added, memory.normed, weights.epsilon)
        multiply(memory.normed, weights.qkv[layer], weights.qkv_bias[layer], heads, False)
        attend(
            memory.heads,
            weights.head_norms[layer],
            weights.head_epsilon,
            weights.turns,
            keys[layer],
            values[layer],
            starts,
            first,
            column,
            weights.windows[layer],
            weights.scale,
            memory.scores,
            memory.mixed,
        )
        multiply(mixed, weights.output[layer], weights.output_bias[layer], memory.added, False)
        add_unit_rows(memory.stream, memory.added, memory.normed, weights.epsilon)
        for part in range(2):
            matrix = weights.gate_up[layer, part]
            bias = weights.gate_up_bias[layer, part]
            multiply(memory.normed, matrix, bias, memory.gate_up[part], False)
        gate(memory.gate_up, memory.active)
        multiply(memory.active, weights.down[layer], weights.down_bias[layer], memory.added, False)

    add_unit_rows(memory.stream, memory.added, memory.normed, weights.epsilon)
    for row in range(rows):
        for i in range(hidden):
            memory.normed[row, i] *= weights.last_factors[i]


@compiled
def multiply(x, matrix, bias, out, transposed):
    """Write x (b, K) times matrix (K, N), plus bias (1, N) unless it is empty, to out (b, N).

    If `transposed`, the matrix is (N, K).
    """
    for row in range(len(out) if len(bias) else 0):
        for i in range(out.shape[1]):
            out[row, i] = bias[0, i]

    # Fortran has the transposed matrices, and takes numbers by their addresses.
    sizes = np.empty(4, np.int64)
    factors = np.empty(2, np.float32)
    sizes[0] = out.shape[1]
    sizes[1] = x.shape[0]
    sizes[2] = x.shape[1]
    sizes[3] = matrix.shape[1]
    factors[0] = 1
    factors[1] = len(bias)
    form = _FORMS[1:].ctypes if transposed else _FORMS.ctypes
    _sgemm(
        form,
        _FORMS.ctypes,
        sizes.ctypes,
        sizes[1:].ctypes,
        sizes[2:].ctypes,
        factors.ctypes,
        matrix.ctypes,
        sizes[3:].ctypes,
        x.ctypes,
        sizes[2:].ctypes,
        factors[1:].ctypes,
        out.ctypes,
        sizes.ctypes,
    )


@compiled
def attend(
    heads, norms, epsilon, turns, keys, values, starts, first, column, window, scale, scores, out
):
    """Compute attention of one new token a row from the product of its projections.

    heads (b, Hq + 2 Hk, D): queries, keys and values; overwritten. norms (Hq + Hk, D): factors of
    the norms of query and key heads, or (0, D). turns (P, D / 2): e^(i angle) at each position.
    keys and values (C, R, Hk, D), of which the rows from `first` on are used: the new token goes
    to `column`, and the first token of a row is at starts (R,). scores (b, Hq, C) is scratch
    memory. out (b, Hq, D) is written.

    All rows go through the columns together, so that keys and values are read in the order in which
    they lie in memory.
    """
    num_key_heads = keys.shape[2]
    num_query_heads = heads.shape[1] - 2 * num_key_heads
    groups = num_query_heads // num_key_heads
    rows = len(heads)
    seen = np.empty(rows, np.int64)
    begin = column

    for row in range(rows):
        mine = heads[row]
        seen[row] = max(starts[first + row], column + 1 - window)
        begin = min(begin, seen[row])
        if norms.shape[0] > 0:
            _normalize(mine[:-num_key_heads], norms, epsilon)
        _rotate(mine[:-num_key_heads], turns[column - starts[first + row]])
        for head in range(num_key_heads):
            for i in range(heads.shape[2]):
                keys[column, first + row, head, i] = mine[num_query_heads + head, i]
                values[column, first + row, head, i] = mine[
                    num_query_heads + num_key_heads + head, i
                ]

    for at in range(begin, column + 1, 4):
        for row in range(rows):
            start = max(at, seen[row])
            stop = min(at + 4, column + 1)
            for query in range(num_query_heads if start < stop else 0):
                row_scores = scores[row, query, start - begin :]
                _score(
                    heads[row, query],
                    keys,
                    start,
                    stop,
                    first + row,
                    query // groups,
                    scale,
                    row_scores,
                )

    for row in range(rows):
        for query in range(num_query_heads):
            _softmax(scores[row, query, seen[row] - begin : column + 1 - begin])
            for i in range(out.shape[2]):
                out[row, query, i] = np.float32(0)

    for at in range(begin, column + 1, 4):
        for row in range(rows):
            start = max(at, seen[row])
            stop = min(at + 4, column + 1)
            for query in range(num_query_heads if start < stop else 0):
                row_scores = scores[row, query, start - begin :]
                _mix(row_scores, values, start, stop, first + row, query // groups, out[row, query])


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
def _score(query, keys, start, stop, row, head, scale, scores):
    """Write query (D,) times the keys (C, R, Hk, D) of columns [start, stop) to scores.

    The keys are those of one row and head. Four are taken at once, so that a number of the query
    is loaded once.
    """
    if stop - start == 4:
        key_0 = keys[start, row, head]
        key_1 = keys[start + 1, row, head]
        key_2 = keys[start + 2, row, head]
        key_3 = keys[start + 3, row, head]
        score_0 = score_1 = score_2 = score_3 = np.float32(0)
        for i in range(len(query)):
            score_0 += query[i] * key_0[i]
            score_1 += query[i] * key_1[i]
            score_2 += query[i] * key_2[i]
            score_3 += query[i] * key_3[i]

        scores[0] = score_0 * scale
        scores[1] = score_1 * scale
        scores[2] = score_2 * scale
        scores[3] = score_3 * scale
    else:
        for column in range(start, stop):
            key = keys[column, row, head]
            score = np.float32(0)
            for i in range(len(query)):
                score += query[i] * key[i]
            scores[column - start] = score * scale


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
def _mix(weights, values, start, stop, row, head, out):
    """Add weights times the values (C, R, Hk, D) of columns [start, stop) to out (D,).

    The values are those of one row and head. Four are taken at once, so that a sum is loaded and
    stored once.
    """
    if stop - start == 4:
        value_0 = values[start, row, head]
        value_1 = values[start + 1, row, head]
        value_2 = values[start + 2, row, head]
        value_3 = values[start + 3, row, head]
        weight_0 = weights[0]
        weight_1 = weights[1]
        weight_2 = weights[2]
        weight_3 = weights[3]
        for i in range(len(out)):
            out[i] += (
                weight_0 * value_0[i]
                + weight_1 * value_1[i]
                + weight_2 * value_2[i]
                + weight_3 * value_3[i]
            )
    else:
        for column in range(start, stop):
            weight = weights[column - start]
            value = values[column, row, head]
            for i in range(len(out)):
                out[i] += weight * value[i]


@compiled
def draw(logits, temperature, keys, columns, scratch, tokens, log_probs):
    """Draw as `verl.rollout.sampling.sample` does from whole vocabularies.

    Writes tokens (b,) and log_probs (b,) from logits (b, V), uint32 row keys (b, 2), or (0, 2) for
    the largest logit, and column hashes (V,). scratch (V,). The noise is the same, but its
    logarithms may differ in the last place.
    """
    factor = np.float32(1) / temperature

    for row in range(logits.shape[0]):
        mine = logits[row]
        # The largest is subtracted before the product: large products are so far apart that the
        # difference would be lost.
        largest = largest_of(mine)
        total = np.float32(0)

        for i in range(len(mine)):
            weight = exp((mine[i] - largest) * factor)
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
        log_probs[row] = (mine[token] - largest) * factor - np.float32(np.log(total))


@compiled
def _first(numbers, wanted):
    """Find the first place of `wanted`; 0 if it is NaN, and then so is the log-prob."""
    for i in range(len(numbers)):
        if numbers[i] == wanted:
            return i
    return 0
