"""Statistics of n scored responses a prompt: pass@k, maj@k, and intervals of means over prompts."""

import functools
import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

MAX_VOTES = 1000  # floats hold C(1000, 500), but not C(1100, 550)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that one of k responses passes, where c of n do: 1 - C(n - c, k) / C(n, k), eq. (1) of
    Chen et al. 2021 (arXiv:2107.03374), as their product that cannot overflow. Unbiased for any k
    up to n."""
    assert 0 <= c <= n, (n, c)
    assert 1 <= k <= n, (n, k)
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def majority_at_k(answers: Sequence[Hashable | None], scores: Sequence[float], k: int) -> float:
    """Mean score of the most frequent answer among k of the n responses, averaged over all C(n, k)
    choices of them; n is at most MAX_VOTES.

    None does not vote; k responses without any answer count their mean score. Of answers equally
    frequent each counts the same. The score of an answer is the mean of its responses' scores.
    """
    assert 1 <= k <= len(answers) == len(scores)
    assert len(answers) <= MAX_VOTES
    of_answer: dict[Hashable | None, list[float]] = {}
    for answer, score in zip(answers, scores):
        of_answer.setdefault(answer, []).append(score)
    silent = of_answer.pop(None, [])
    counts = Counter(len(values) for values in of_answer.values())
    chances = _winning_chances(tuple(sorted(counts.items())), len(silent))
    expected = sum(
        float(chances[len(values)][k]) * float(np.mean(values)) for values in of_answer.values()
    )
    nobody_votes = math.comb(len(silent), k) / math.comb(len(answers), k)
    return expected + (nobody_votes * float(np.mean(silent)) if silent else 0.0)


@functools.lru_cache(maxsize=4096)  # prompts have the same few patterns of votes
def _winning_chances(counts: tuple[tuple[int, int], ...], silent: int) -> dict[int, np.ndarray]:
    """Compute, for an answer that m of n responses give, the chance (n + 1,) that it wins among k
    of them, for every k.

    `counts`: (m, how many answers are given m times); `silent`: responses without an answer. Ways
    to draw responses are counted, by how many are drawn and how many other answers have as many
    votes as the winner.
    """
    n = silent + sum(m * number for m, number in counts)
    total = _ways(n, n)
    chances: dict[int, np.ndarray] = {}
    for m, _ in counts:
        wins = np.zeros_like(total)
        for votes in range(1, m + 1):
            others = [other for other, number in counts for _ in range(number - (other == m))]
            by_ties = _ways_of_others(others, silent, votes, n)
            # A tie is won by each of its answers in turn.
            shared = (by_ties / np.arange(1, len(by_ties) + 1)[:, None]).sum(0)
            wins[votes:] += math.comb(m, votes) * shared[: n + 1 - votes]
        chances[m] = wins / total
    return chances


def _ways_of_others(others: Sequence[int], silent: int, votes: int, n: int) -> np.ndarray:
    """Count the ways (ties + 1, n + 1) to draw responses of other answers, none with more than
    `votes`: row t has those with t answers at it, column d those of d responses."""
    ways = np.zeros((1 + sum(m >= votes for m in others), n + 1))
    ways[0] = _ways(silent, n)
    for m in others:
        longer = np.zeros_like(ways)
        for drawn in range(min(m, votes) + 1):
            added = math.comb(m, drawn) * ways[:, : n + 1 - drawn]
            if drawn == votes:
                longer[1:, drawn:] += added[:-1]
            else:
                longer[:, drawn:] += added
        ways = longer
    return ways


def _ways(of: int, n: int) -> np.ndarray:
    """Count the ways (n + 1,) to draw so many of `of` responses."""
    return np.array([math.comb(of, drawn) for drawn in range(n + 1)], dtype=float)


def bootstrap_intervals(
    values: np.ndarray, *, confidence: float, resamples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute bounds (M,) and (M,) of the means of the columns of (P, M) `values`, NaN where a
    prompt has none.

    The percentile bootstrap over prompts: the prompts are what is drawn at random, with all their
    responses.
    """
    generator = np.random.default_rng(seed)
    present = np.isfinite(values)
    filled = np.where(present, values, 0.0)
    prompts = len(values)
    means = np.empty((resamples, values.shape[1]))
    for number in range(resamples):
        weights = np.bincount(generator.integers(prompts, size=prompts), minlength=prompts)
        with np.errstate(invalid="ignore"):  # a draw without any prompt that has the value
            means[number] = (weights @ filled) / (weights @ present)
    outside = (1 - confidence) / 2
    low, high = np.nanquantile(means, [outside, 1 - outside], axis=0)
    return low, high
