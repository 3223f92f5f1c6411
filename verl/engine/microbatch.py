"""Which rows share a micro-batch: planned once from the lengths, the same on every rank and in every run."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from verl.utils.errors import ConfigError


@dataclass(frozen=True)
class TokenBudget:
    """The size of a micro-batch: at most `max_tokens` packed tokens, or exactly `rows` rows (the last may have fewer).

    `key` is the configuration key that errors name.
    """

    max_tokens: int | None = None
    rows: int | None = None
    key: str = "the key *_max_token_len_per_gpu of this role"

    def __post_init__(self) -> None:
        if (self.max_tokens is None) == (self.rows is None):
            raise ConfigError(
                "A micro-batch is sized by tokens or by rows: give exactly one, "
                f"got max_tokens={self.max_tokens} and rows={self.rows}."
            )
        size = self.max_tokens if self.max_tokens is not None else self.rows
        assert size is not None
        if size < 1:
            raise ConfigError(f"A micro-batch needs room for at least one token or row, got {size}. Raise {self.key}.")


def plan_micro_batches(lengths: Sequence[int], budget: TokenBudget) -> list[list[int]]:
    """Row numbers of every micro-batch; each row stands in exactly one, rows within one ascend.

    By rows: consecutive chunks. By tokens: no more bins than first-fit decreasing needs (<= 11/9 of the optimum + 1),
    filled evenly where an even filling fits, in the order of their first rows. Raises ConfigError for a row longer than
    the budget. O(rows * log(bins)) for each count of bins tried.
    """
    if budget.rows is not None:
        return [
            list(range(start, min(start + budget.rows, len(lengths)))) for start in range(0, len(lengths), budget.rows)
        ]
    assert budget.max_tokens is not None
    for row, length in enumerate(lengths):
        if length > budget.max_tokens:
            raise ConfigError(
                f"A micro-batch holds at most {budget.max_tokens} tokens, but row {row} has {length}. "
                f"Raise {budget.key} to at least {max(lengths)} (prompt and response together)."
            )
    fallback = _first_fit_decreasing(lengths, budget.max_tokens)
    # No two rows of more than half the budget share a bin.
    fewest = max(-(-sum(lengths) // budget.max_tokens), sum(2 * length > budget.max_tokens for length in lengths), 1)
    for num_bins in range(fewest, len(fallback) + 1):
        bins = _longest_first(lengths, num_bins)
        if all(sum(lengths[row] for row in rows) <= budget.max_tokens for rows in bins):
            return _ordered(bins)
    return _ordered(fallback)


def _longest_first(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Even bins, whatever they hold: each row, longest first, goes to the emptiest one (LPT; Graham 1969)."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    filled = [(0, index) for index in range(num_bins)]
    for row in _by_falling_length(lengths):
        tokens, index = heapq.heappop(filled)
        bins[index].append(row)
        heapq.heappush(filled, (tokens + lengths[row], index))
    return bins


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Few bins, never overfull: each row, longest first, goes to the first bin that has room."""
    bins: list[list[int]] = []
    room: list[int] = []
    for row in _by_falling_length(lengths):
        index = next((index for index, free in enumerate(room) if free >= lengths[row]), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[index].append(row)
        room[index] -= lengths[row]
    return bins


def _by_falling_length(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


def _ordered(bins: list[list[int]]) -> list[list[int]]:
    return sorted(sorted(rows) for rows in bins if rows)
