"""Statistics of n scored responses per prompt: pass@k, maj@k, and intervals of means."""

import functools
import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

MAX_VOTES = 1000  # floats hold C(1000, 500), but not C(1100, 550)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the chance that at least one of k responses passes, if c of n do.

    1 - C(n - c, k) / C(n, k), eq. (1) of Chen et al. 2021 (arXiv:2107.03374), as their product,
    which cannot overflow. Unbiased for any k up to n.
    """
    assert 0 <= c <= n, (n, c)
    assert 1 <= k <= n, (n, k)
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def majority_at_k(answers: Sequence[Hashable | None], scores: Sequence[float], k: int) -> float:
    """Return the expected score of the most frequent answer among k of n responses.

    The mean is over all C(n, k) choices; n is at most MAX_VOTES. None does not vote: k responses
    without any answer count with their mean score. Answers of equal frequency count equally. The
    score of an answer is the mean of its responses' scores.
    """
    assert 1 <= k <= len(answers) == len(scores)
    assert len(answers) <= MAX_VOTES

    scores_by_answer: dict[Hashable | None, list[float]] = {}
    for answer, score in zip(answers, scores):
        scores_by_answer.setdefault(answer, []).append(score)
    silent = scores_by_answer.pop(None, [])

    counts = Counter(len(values) for values in scores_by_answer.values())
    chances = _winning_chances(tuple(sorted(counts.items())), len(silent))
    expected = 0.0
    for values in scores_by_answer.values():
        expected += float(chances[len(values)][k]) * float(np.mean(values))

    if silent:
        no_votes = math.comb(len(silent), k) / math.comb(len(answers), k)
        expected += no_votes * float(np.mean(silent))
    return expected


@functools.lru_cache(maxsize=4096)  # prompts have the same few patterns of votes
def _winning_chances(counts: tuple[tuple[int, int], ...], silent: int) -> dict[int, np.ndarray]:
    """Compute {m: chances (n + 1,)} that an answer of m of n responses wins among k of them.

    The chances are for every k from 0 to n. `counts` has (m, number of answers that m responses
    give), and `silent` is the number of responses without an answer. The ways to draw responses are
    counted by their number, and by the number of other answers with as many votes as the winner.
    """
    n = silent + sum(m * number for m, number in counts)
    total = _ways(n, n)
    chances: dict[int, np.ndarray] = {}

    for m, _ in counts:
        wins = np.zeros_like(total)
        for votes in range(1, m + 1):
            others: list[int] = []
            for other, number in counts:
                others += [other] * (number - (other == m))
            by_ties = _ways_of_others(others, silent, votes, n)
            # A tie is won by each of its answers in turn.
            shared = (by_ties / np.arange(1, len(by_ties) + 1)[:, None]).sum(0)
            wins[votes:] += math.comb(m, votes) * shared[: n + 1 - votes]
        chances[m] = wins / total

    return chances


def _ways_of_others(others: Sequence[int], silent: int, votes: int, n: int) -> np.ndarray:
    """Count the ways (ties + 1, n + 1) to draw other answers, with at most `votes` votes each.

    Row t has the ways in which t answers have exactly `votes` votes, column d those of d responses.
    """
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
    """Count the ways to draw 0 to n of `of` responses, shape (n + 1,)."""
    return np.array([math.comb(of, drawn) for drawn in range(n + 1)], dtype=float)


def bootstrap_intervals(
    values: np.ndarray, *, confidence: float, resamples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute lower and upper bounds (M,) of the means of the columns of `values` (P, M).

    A missing value is NaN. This is the percentile bootstrap over prompts: it draws prompts at
    random, each with all its responses.
    """
    generator = np.random.default_rng(seed)
    present = np.isfinite(values)
    filled = np.where(present, values, 0.0)
    prompts = len(values)
    means = np.empty((resamples, values.shape[1]))
    for number in range(resamples):
        weights = np.bincount(generator.integers(prompts, size=prompts), minlength=prompts)
        with np.errstate(invalid="ignore"):  # in a draw, all prompts may lack a value
            means[number] = (weights @ filled) / (weights @ present)
    outside = (1 - confidence) / 2
    low, high = np.nanquantile(means, [outside, 1 - outside], axis=0)
    return low, high
