"""Plan which rows share a micro-batch, from lengths alone: equal on every rank, in every run."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from verl.utils.arithmetic import ceil_div
from verl.utils.errors import ConfigError

Plan = list[list[int]]  # the row numbers of each micro-batch; every row is in one of them


@dataclass(frozen=True)
class TokenBudget:
    """The size of a micro-batch: a limit in tokens, or a number of rows.

    Without either as many tokens as fit, which the engine finds out (see `verl.engine.budget`).

    Args:
        max_tokens: most packed tokens.
        rows: rows of each; the last may have fewer.
        key: the configuration key of the tokens, also where rows are given.
        rows_key: the key of the rows; None: named like `key`.
        phase: purpose of the passes, for messages.
    """

    max_tokens: int | None = None
    rows: int | None = None
    key: str = "the key *_max_token_len_per_gpu of this role"
    rows_key: str | None = None
    phase: str = "a pass over the model"

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.rows is not None:
            raise ConfigError(
                "A micro-batch is sized by tokens or by rows: give one at most, "
                f"got max_tokens={self.max_tokens} and rows={self.rows}."
            )
        if self.size is not None and self.size < 1:
            raise ConfigError(
                f"A micro-batch needs room for at least one token or row, got {self.size}. Raise "
                f"{self.size_key}."
            )

    @property
    def size(self) -> int | None:
        """The limit in tokens, or the number of rows."""
        return self.max_tokens if self.rows is None else self.rows

    @property
    def size_key(self) -> str:
        """Return the configuration key of `size`."""
        if self.rows is None:
            return self.key
        return self.rows_key or self.key.replace("max_token_len", "micro_batch_size")

    @property
    def unit(self) -> str:
        """Return the unit of `size`."""
        return "tokens" if self.rows is None else "rows"

    @property
    def is_automatic(self) -> bool:
        return self.size is None


class SharedPrompts(NamedTuple):
    """Which of B rows compute their prompt together, if they stand in one micro-batch."""

    number: Sequence[int]  # (B,) equal for rows that share a prompt
    lengths: Sequence[int]  # (B,) tokens of each row's prompt


def plan_micro_batches(
    lengths: Sequence[int], budget: TokenBudget, prompts: SharedPrompts | None = None
) -> Plan:
    """Return the row numbers of every micro-batch; each row is in one, rows within one ascend.

    By rows: consecutive chunks. By tokens: no more bins than first-fit decreasing needs (<= 11/9 of
    the optimum + 1), filled evenly where an even filling fits, in the order of their first rows. A
    shared prompt counts once; its rows stay together, or, where they exceed the budget, are dealt
    to micro-batches that compute the prompt again: evenly, or the first ones full, whichever gives
    fewer micro-batches. Raises ConfigError for a row longer than the budget. O(rows * log(bins))
    for each count of bins tried.
    """
    if budget.rows is not None:
        chunks: Plan = []
        for start in range(0, len(lengths), budget.rows):
            end = min(start + budget.rows, len(lengths))
            chunks.append(list(range(start, end)))
        return chunks

    assert budget.max_tokens is not None
    for row, length in enumerate(lengths):
        if length > budget.max_tokens:
            raise ConfigError(
                f"A micro-batch holds at most {budget.max_tokens} tokens, but row {row} has "
                f"{length}. Raise {budget.key} to at least {max(lengths)} (prompt and response "
                "together)."
            )
    if prompts is None:
        return _ordered(_fill(lengths, budget.max_tokens))

    plans = []
    for deal in (_fill, _first_fit_decreasing):
        units = _inseparable(lengths, prompts, budget.max_tokens, deal)
        tokens = [_num_tokens(unit, lengths, prompts) for unit in units]

        bins: Plan = []
        for members in _fill(tokens, budget.max_tokens):
            rows: list[int] = []
            for unit in members:
                rows += units[unit]
            bins.append(rows)
        plans.append(_ordered(bins))
    return min(plans, key=len)


def tokens_of(rows: Iterable[int], lengths: Sequence[int]) -> int:
    """Count the tokens of rows."""
    return sum(lengths[row] for row in rows)


def most_tokens(plan: Plan, lengths: Sequence[int]) -> int:
    """Count the tokens of the largest micro-batch."""
    return max(tokens_of(rows, lengths) for rows in plan)


def _inseparable(
    lengths: Sequence[int],
    prompts: SharedPrompts,
    max_tokens: int,
    deal: Callable[[Sequence[int], int], Plan],
) -> Plan:
    """Return the rows of each prompt; `deal` cuts those that exceed the budget into parts."""
    rows_of: dict[int, list[int]] = {}
    for row, number in enumerate(prompts.number):
        rows_of.setdefault(number, []).append(row)

    units: Plan = []
    for rows in rows_of.values():
        if _num_tokens(rows, lengths, prompts) <= max_tokens:
            units.append(rows)
            continue
        responses = [lengths[row] - prompts.lengths[row] for row in rows]
        parts = deal(responses, max_tokens - prompts.lengths[rows[0]])
        for part in parts:
            units.append([rows[member] for member in part])
    return units


def _num_tokens(rows: Sequence[int], lengths: Sequence[int], prompts: SharedPrompts) -> int:
    """Count the tokens of rows of one prompt, which is computed once."""
    prompt = prompts.lengths[rows[0]]
    repeated = prompt * (len(rows) - 1)
    return tokens_of(rows, lengths) - repeated


def _fill(lengths: Sequence[int], max_tokens: int) -> Plan:
    """Return bins of at most `max_tokens`, as even as their number allows."""
    fallback = _first_fit_decreasing(lengths, max_tokens)
    # No two rows of more than half the budget share a bin.
    long_rows = sum(2 * length > max_tokens for length in lengths)
    full_bins = ceil_div(sum(lengths), max_tokens)
    fewest = max(full_bins, long_rows, 1)

    for num_bins in range(fewest, len(fallback) + 1):
        bins = _longest_first(lengths, num_bins)
        if most_tokens(bins, lengths) <= max_tokens:
            return bins
    return fallback


def _longest_first(lengths: Sequence[int], num_bins: int) -> Plan:
    """Fill bins evenly: each row, longest first, goes to the emptiest one (LPT; Graham 1969)."""
    bins: Plan = [[] for _ in range(num_bins)]
    filled = [(0, index) for index in range(num_bins)]
    for row in _by_falling_length(lengths):
        tokens, index = heapq.heappop(filled)
        bins[index].append(row)
        heapq.heappush(filled, (tokens + lengths[row], index))
    return bins


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> Plan:
    """Fill few bins: each row, longest first, goes to the first one that has room."""
    bins: Plan = []
    room: list[int] = []
    for row in _by_falling_length(lengths):
        length = lengths[row]
        index = _first_with_room(room, length)
        if index == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[index].append(row)
        room[index] -= length
    return bins


def _first_with_room(room: Sequence[int], length: int) -> int:
    """Return the number of the first bin with room for `length`; that of a new one if none has."""
    for index, free in enumerate(room):
        if free >= length:
            return index
    return len(room)


def _by_falling_length(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))


def _ordered(bins: Plan) -> Plan:
    return sorted(sorted(rows) for rows in bins if rows)
