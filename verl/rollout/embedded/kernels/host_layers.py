"""What a decode step on CPU does between its matrix products, one call each, on the rows of one thread; compiled by
numba."""

import numpy as np

from verl.rollout.embedded.kernels.host_math import compiled, exp, inlined, largest_of


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
